// A conversation of @openai/agents-realtime: `agents_realtime.mjs URL FOLDER`. No listener for errors, as in its
// documentation: an error event of the server ends the process.
import fs from "node:fs";
import path from "node:path";
import { RealtimeAgent, RealtimeSession, tool } from "@openai/agents-realtime";
import { z } from "zod";

const [url, folder] = process.argv.slice(2);
const PIECE_MS = 100, PIECE = 4800, WAIT_MS = 60_000, END_MS = 1200;
const SOUND = "response.output_audio.delta";
const TURNS = ["second", "first", "second", "first"]; // the last spoken turns, as in talking.py
const events = [], calls = [];
let soundMs = 0, interrupted = 0, due = Date.now();

const look = tool({
  name: "look",
  description: "Look at the moon or the sky.",
  parameters: z.object({ at: z.enum(["moon", "sky"]) }),
  execute: async ({ at }) => {
    calls.push(at);
    choose("none");
    return "seven";
  },
});
const agent = new RealtimeAgent({ name: "tiny", instructions: "Be brief.", tools: [look] });
const session = new RealtimeSession(agent, { transport: "websocket", model: "tiny" });
session.transport.on("*", ({ delta, audio, ...event }) => events.push(event.type === SOUND ? { ...event, delta } : event));
session.on("audio", (event) => (soundMs += event.data.byteLength / 48));
session.on("audio_interrupted", () => interrupted++);

function choose(toolChoice) {
  session.transport.updateSessionConfig({ instructions: "Be brief.", tools: [look], toolChoice });
}

async function piece(data) {
  due = Math.max(due + PIECE_MS, Date.now());
  session.sendAudio(data);
  await new Promise((resolve) => setTimeout(resolve, due - Date.now()));
}

async function say(name) {
  const words = fs.readFileSync(path.join(folder, `${name}.pcm`));
  const data = new Uint8Array(Buffer.concat([words, Buffer.alloc(END_MS * 48)])).buffer;
  for (let at = 0; at < data.byteLength; at += PIECE) await piece(data.slice(at, at + PIECE));
}

async function silence(until) {
  const end = Date.now() + WAIT_MS;
  while (!until()) {
    if (Date.now() > end) throw new Error(`not within ${WAIT_MS} ms: ${until}`);
    await piece(new ArrayBuffer(PIECE));
  }
}

const count = (type) => events.filter((event) => event.type === type).length;

await session.connect({ apiKey: "none", url });
await say("first");
await silence(() => count("response.done") === 1);
await say("long");
await silence(() => events.at(-1).type === "response.output_audio.delta");
await say("second");
await silence(() => count("response.done") === 3);
choose("required");
session.sendMessage("say seven");
await silence(() => count("response.done") === 5);
await say("first");
await silence(() => count("response.done") === 6);
for (const name of TURNS) {
  const before = count("response.done");
  await say(name);
  await silence(() => count("response.done") > before);
}
session.close();
console.log(JSON.stringify({ events, calls, sound_ms: soundMs, interrupted, errors: [] }));
