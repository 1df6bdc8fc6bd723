// The page: connects the controls with the server, by sessions of /v1/realtime or by chats.

import { Realtime } from "./realtime.js";
import { Server, ServerError } from "./server.js";
import { Microphone, Pcm16, Player, RATE } from "./sound.js";
import { Answer, Replicas, Said, element, follow } from "./view.js";

const REALTIME = "/v1/realtime/client_secrets"; // exists where /v1/realtime does
const KINDS = { audio: "Speech", text: "Text", image: "Picture" }; // modalities that the page can show
const REPLICAS_MS = 2000;
const PREVIEWS = 4;
const PREVIEW_FIELD = "previews";

const $ = (id) => document.getElementById(id);
const turns = $("turns");
const server = new Server(() => $("key").value.trim());
const replicas = new Replicas($("replicas"), $("server"));

let facts = { needs_key: false, routes: [] };
let model = null; // its card of /v1/models
let session = null; // of /v1/realtime
let connecting = null;
let answer = null; // the last one
let running = null; // the chat in progress: its AbortController; or "response" of the session
let said = new Map(); // turns of the user by item
let pcm = null; // decodes the sound of the answer
let history = []; // {role, turn}
let speaking = false;
let talkingSince = 0;

// -- status and errors --------------------------------------------------------------------------------------------

function show(state, text) {
  const status = $("status");
  status.dataset.state = state;
  if (status.textContent !== text) status.textContent = text;
}

function update() {
  $("stop").disabled = !running && !answer?.audible;
  for (const id of ["message", "send", "talk"]) $(id).disabled = !model;
  $("empty").hidden = turns.childElementCount > 0;
  $("voice").disabled = Boolean(session?.fixed);
  $("voice").title = session?.fixed ? "A session keeps its voice. Begin a new conversation to change it." : "";
  if (!model) show("off", facts.needs_key ? "The API key is needed" : "Not connected");
  else if (speaking) show("you", "You are speaking");
  else if (answer?.audible && answer.heard.began) show("answer", microphone.on ? "Answering; speak to interrupt" : "Answering");
  else if (running) show("work", "Working");
  else if (microphone.on) show("listen", "Listening");
  else show("ready", "Ready");
}

function fail(error) {
  if (error.name === "AbortError") return;
  $("alert-text").textContent = error.message;
  $("alert").hidden = false;
  if (error.status === 401 && facts.needs_key) $("key").focus();
  update();
}

function clearError() {
  $("alert").hidden = true;
}

// -- the server ---------------------------------------------------------------------------------------------------

async function begin() {
  try {
    facts = await server.json("playground/facts.json", { keyless: true });
    $("key-form").hidden = !facts.needs_key;
    if (facts.needs_key && !model) $("hint").textContent = "Enter the server's API key first.";
    if (facts.needs_key && !server.key()) {
      update();
      $("key").focus();
      return;
    }
    const { data } = await server.json("v1/models");
    model = data[0];
    clearError();
    offer();
  } catch (error) {
    model = null;
    fail(error.status === 401 ? new ServerError("The server refuses this key (status 401).", 401) : error);
  }
  update();
  watch();
}

function offer() {
  $("model").textContent = model.id;
  document.title = `${model.id} – Playground`;
  const kinds = Object.keys(KINDS).filter((kind) => model.modalities.includes(kind));
  $("kinds").replaceChildren(
    $("kinds").querySelector("legend"),
    ...kinds.map((kind, at) => {
      const radio = element("input", { type: "radio", name: "kind", value: kind, checked: at === 0 });
      return element("label", {}, radio, element("span", {}, KINDS[kind]));
    }),
  );
  $("kinds").hidden = kinds.length < 2;
  const voices = model.voices ?? [];
  $("voice").replaceChildren(...voices.map((name) => element("option", { selected: name === model.default_voice }, name)));
  $("voice-field").hidden = !voices.length;
  $("talk").hidden = !facts.routes.includes(REALTIME);
  $("hint").textContent = $("talk").hidden
    ? `Type a message; the answer is ${kinds.map((kind) => KINDS[kind].toLowerCase()).join(" or ")}.`
    : "Press Talk and speak, or type a message. Speak again at any time to interrupt the answer.";
  update();
  $("message").focus();
}

let watching = null;

async function watch() {
  clearTimeout(watching);
  if (model && !document.hidden) {
    try {
      replicas.show(await server.replicas());
    } catch (error) {
      replicas.fail(error.message);
    }
  }
  watching = setTimeout(watch, REPLICAS_MS);
}

// -- turns --------------------------------------------------------------------------------------------------------

const kind = () => document.querySelector("#kinds input:checked")?.value ?? model.modalities[0];
const talks = () => facts.routes.includes(REALTIME) && kind() !== "image";

async function submit() {
  const text = $("message").value.trim();
  if (!text || !model) return;
  $("message").value = "";
  clearError();
  try {
    if (kind() === "audio") player.unlock();
    if (talks()) {
      const found = await connected();
      await interrupt();
      found.say("user", text);
      remember("user", new Said(turns, text));
      found.send("response.create");
    } else {
      await interrupt();
      const own = new Said(turns, text);
      await chat(own);
    }
  } catch (error) {
    fail(error);
  }
  update();
}

function remember(role, turn) {
  history.push({ role, turn });
}

// Stops the answer, and the sound that is not played yet.
async function interrupt() {
  const stopped = answer;
  const was = running;
  running = null;
  if (was instanceof AbortController) was.abort();
  else if (was) session.send("response.cancel");
  if (stopped?.audible) await hush(stopped);
  else if (was && stopped) {
    stopped.silenced = true;
    stopped.remark("stopped", "interrupted");
    stopped.end();
  }
  update();
}

// Stops the sound of an answer. The played part stays in the conversation.
async function hush(stopped) {
  stopped.silenced = true;
  const { id, ms } = await player.stop();
  const played = id === stopped.item ? ms : 0;
  stopped.playing("stopped");
  stopped.remark(`interrupted after ${(played / 1000).toFixed(1)} s`, "interrupted");
  if (stopped.session && stopped.session === session) {
    const fields = { item_id: stopped.item, content_index: 0, audio_end_ms: Math.floor(played) };
    session.send("conversation.item.truncate", fields);
  } else if (!stopped.session) {
    stopped.set(heard(stopped.words, played, stopped.made));
  }
  update();
}

// The part of a text that was heard, up to a whole word.
function heard(text, played, made) {
  if (!made || played >= made) return text;
  const cut = text.slice(0, Math.floor((text.length * played) / made));
  return cut.slice(0, Math.max(cut.lastIndexOf(" "), 0));
}

// -- chats --------------------------------------------------------------------------------------------------------

async function chat(own) {
  const wanted = kind();
  const body = chatBody(wanted, own);
  const made = new Answer(turns, own);
  const abort = new AbortController();
  [answer, running, pcm] = [made, abort, new Pcm16()];
  if (wanted !== "image") {
    remember("user", own);
    remember("assistant", made);
  }
  update();
  let metrics = null;
  try {
    for await (const chunk of server.chat(body, abort.signal)) {
      metrics = chunk.metrics ?? metrics;
      if (chunk.progress) made.progress(chunk.progress);
      for (const choice of chunk.choices) await take(made, choice);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      made.remark("failed", "failed");
      fail(error);
    }
  }
  if (made.item) player.end(made.item);
  if (running === abort) running = null;
  made.end(metrics);
}

function chatBody(wanted, own) {
  const message = (role, content) => ({ role, content });
  const before = wanted === "image" ? [] : history.filter(({ turn }) => turn.words);
  const system = $("instructions").value.trim();
  const body = {
    model: model.id,
    messages: [
      ...(system ? [message("system", system)] : []),
      ...before.map(({ role, turn }) => message(role, turn.words)),
      message("user", own.words),
    ],
    modalities: wanted === "audio" && model.modalities.includes("text") ? ["text", "audio"] : [wanted],
    stream_options: { include_usage: true },
    return_stage_metrics: true,
  };
  if (wanted === "audio") body.audio = { format: "pcm16", ...($("voice").value ? { voice: $("voice").value } : {}) };
  if (wanted === "image" && model.request_fields.includes(PREVIEW_FIELD)) body[PREVIEW_FIELD] = PREVIEWS;
  return body;
}

async function take(own, { delta, audio_metadata: about }) {
  const text = delta.content ?? delta.audio?.transcript;
  if (typeof text === "string" && text) own.add(text);
  if (delta.audio?.data) {
    const rate = about?.sample_rate_hz || RATE;
    const samples = pcm.samples(delta.audio.data);
    own.item ??= `chat-${own.zero}`;
    own.made = (own.made ?? 0) + (1000 * samples.length) / rate;
    own.sound();
    await player.play(own.item, samples, rate);
  }
  for (const image of delta.images ?? []) await own.picture(image.image_url.url, Boolean(image.partial));
  update();
}

// -- sessions of /v1/realtime -------------------------------------------------------------------------------------

// Returns the session; opens one with the turns until now if there is none.
async function connected() {
  if (session?.open) return session;
  connecting ??= connect().finally(() => (connecting = null));
  return connecting;
}

async function connect() {
  const made = new Realtime(server, model.id, events());
  await made.connect(settings());
  for (const { role, turn } of history) if (turn.words) made.say(role, turn.words);
  session = made;
  session.manual = made.session.audio.input.turn_detection === null;
  return made;
}

function settings() {
  const voice = $("voice").value;
  return {
    output_modalities: [kind() === "text" ? "text" : "audio"],
    instructions: $("instructions").value.trim(),
    audio: { input: { transcription: {} }, ...(voice && !session?.fixed ? { output: { voice } } : {}) },
  };
}

function configure() {
  if (session?.open && talks()) session.send("session.update", { session: { type: "realtime", ...settings() } });
}

function userTurn(id) {
  if (!said.has(id)) {
    const turn = new Said(turns);
    said.set(id, turn);
    remember("user", turn);
  }
  return said.get(id);
}

function events() {
  return {
    closed(error) {
      session = null;
      microphone.on && talk();
      if (running) {
        if (answer.voiced) player.end(answer.item);
        answer.remark("cut off", "failed");
        answer.end();
      }
      running = null;
      fail(error);
    },
    error: ({ error }) => fail(new ServerError(error.message)),
    "input_audio_buffer.speech_started": ({ item_id }) => {
      speaking = true;
      userTurn(item_id);
      const detection = session.session.audio.input.turn_detection;
      if (answer?.audible && detection?.interrupt_response !== false) hush(answer).catch(fail);
      update();
    },
    "input_audio_buffer.speech_stopped": ({ item_id }) => {
      speaking = false;
      userTurn(item_id).ended = performance.now();
      update();
    },
    "input_audio_buffer.committed": ({ item_id }) => {
      speaking = false;
      const turn = userTurn(item_id);
      if (session.manual) turn.began = talkingSince;
      turn.ended ??= performance.now();
    },
    "conversation.item.input_audio_transcription.delta": ({ item_id, delta }) => userTurn(item_id).add(delta),
    "conversation.item.input_audio_transcription.completed": ({ item_id, transcript }) =>
      userTurn(item_id).set(transcript),
    "conversation.item.input_audio_transcription.failed": ({ item_id, error }) => {
      userTurn(item_id).set("");
      userTurn(item_id).remark(`no transcript: ${error.message}`);
    },
    "response.created": () => {
      const last = history.at(-1);
      answer = new Answer(turns, last?.role === "user" ? last.turn : null);
      answer.session = session;
      running = "response";
      pcm = new Pcm16();
      remember("assistant", answer);
      update();
    },
    "response.output_item.added": ({ item }) => {
      if (item.type === "message") answer.item = item.id;
    },
    "response.output_text.delta": ({ delta }) => answer.add(delta),
    "response.output_audio_transcript.delta": ({ delta }) => answer.add(delta),
    "response.output_audio.delta": ({ item_id, delta }) => {
      session.fixed = true;
      if (answer.silenced) return;
      answer.sound();
      player.play(item_id, pcm.samples(delta)).catch(fail);
    },
    "response.output_audio.done": ({ item_id }) => answer.silenced || player.end(item_id),
    "response.done": ({ response }) => {
      running = null;
      const details = response.status_details;
      if (response.status === "failed") {
        answer.remark("failed", "failed");
        fail(new ServerError(details?.error?.message ?? "The response has failed."));
      } else if (response.status === "incomplete") {
        answer.remark(`incomplete: ${details?.reason ?? "cut"}`);
      } else if (response.status === "cancelled" && !answer.note.textContent) {
        answer.remark("interrupted", "interrupted");
      }
      answer.end(response.metrics);
      update();
    },
    // The item now has the words that were heard.
    "conversation.item.truncated": ({ item_id }) => session.send("conversation.item.retrieve", { item_id }),
    "conversation.item.retrieved": ({ item }) => {
      const found = history.find(({ turn }) => turn.item === item.id)?.turn;
      found?.set(item.content[0].transcript);
    },
  };
}

// -- sound --------------------------------------------------------------------------------------------------------

const player = new Player((kind, id) => {
  if (answer?.item !== id || answer.silenced) return;
  answer.playing(kind);
  update();
});

const microphone = new Microphone({
  take: (audio) => session?.send("input_audio_buffer.append", { audio }),
  level: (peak) => $("talk").style.setProperty("--level", Math.min(1, peak * 1.5).toFixed(2)),
  ended: () => {
    talk();
    fail(new Error("The microphone is gone."));
  },
});

async function talk() {
  if (microphone.on) {
    microphone.stop();
    if (session?.open && (speaking || session.manual)) {
      session.send("input_audio_buffer.commit");
      session.send("response.create");
    } else {
      session?.send("input_audio_buffer.clear");
    }
    speaking = false;
  } else {
    clearError();
    try {
      player.unlock();
      const { manual } = await connected();
      if (manual) await interrupt();
      await microphone.start();
      talkingSince = performance.now();
    } catch (error) {
      fail(error);
    }
  }
  $("talk").setAttribute("aria-pressed", String(microphone.on));
  update();
}

// -- controls -----------------------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") interrupt().catch(fail);
});
$("talk").addEventListener("click", talk);
$("stop").addEventListener("click", () => interrupt().catch(fail));
$("dismiss").addEventListener("click", () => {
  clearError();
  $("message").focus();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  begin();
});
$("kinds").addEventListener("change", configure);
$("voice").addEventListener("change", configure);
$("instructions").addEventListener("change", configure);
$("new").addEventListener("click", async () => {
  await interrupt();
  microphone.on && (await talk());
  session?.close();
  [session, answer, history, said] = [null, null, [], new Map()];
  turns.replaceChildren();
  clearError();
  update();
  $("message").focus();
});
document.addEventListener("visibilitychange", watch);

follow(turns);
begin();
