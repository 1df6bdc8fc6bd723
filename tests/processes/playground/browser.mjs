// Uses /playground in headless Chromium: `browser.mjs conversation|pictures URL FOLDER [KEY]`. The microphone is the
// file mic.wav of the folder. Writes screenshots and the played sounds (WebM) into the folder; prints JSON.
import fs from "node:fs";
import path from "node:path";
import chromium from "@sparticuz/chromium";
import axe from "axe-core";
import puppeteer from "puppeteer-core";

const [scenario, url, folder, key = ""] = process.argv.slice(2);
const WAIT_MS = 90_000, SETTLE_MS = 300;
const found = { requests: [], protocols: [], errors: [], sounds: [], violations: {}, conversations: [] };

const flags = ["--no-sandbox", "--no-proxy-server", "--font-render-hinting=none", "--in-process-gpu"];
flags.push("--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader");
flags.push("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream");
flags.push(`--use-file-for-fake-audio-capture=${path.join(folder, "mic.wav")}%noloop`);
const executablePath = await chromium.executablePath();
const browser = await puppeteer.launch({ executablePath, headless: "shell", args: flags });
const page = await browser.newPage();
page.setDefaultTimeout(WAIT_MS);
await page.setViewport({ width: 1280, height: 800 });

page.on("request", (request) => found.requests.push(request.url()));
page.on("pageerror", (error) => found.errors.push(String(error)));
const wire = await page.createCDPSession();
await wire.send("Network.enable");
wire.on("Network.webSocketWillSendHandshakeRequest", ({ request }) =>
  found.protocols.push(request.headers["Sec-WebSocket-Protocol"]),
);

// The sound for the loudspeaker is recorded, and pictures are counted.
await page.evaluateOnNewDocument(() => {
  const connect = AudioNode.prototype.connect;
  AudioNode.prototype.connect = function (target, ...more) {
    if (target === this.context.destination) {
      const tap = this.context.createMediaStreamDestination();
      connect.call(this, tap);
      window.recorder = new MediaRecorder(tap.stream, { mimeType: "audio/webm;codecs=opus" });
      window.recorder.start();
    }
    return connect.call(this, target, ...more);
  };
  // The sound of the microphone, as it is sent.
  const send = WebSocket.prototype.send;
  window.sent = [];
  WebSocket.prototype.send = function (text) {
    const event = JSON.parse(text);
    if (event.type === "input_audio_buffer.append") window.sent.push(event.audio);
    return send.call(this, text);
  };
  window.refused = [];
  document.addEventListener("securitypolicyviolation", (event) => window.refused.push(event.violatedDirective));
  window.pictures = new Set();
  const seen = () => document.querySelectorAll(".pictures img").forEach((image) => window.pictures.add(image.src));
  new MutationObserver(seen).observe(document, { subtree: true, childList: true, attributes: true });
});

const state = () => page.$eval("#status", (status) => status.dataset.state);
const until = (wanted) =>
  page.waitForFunction((names) => names.includes(document.getElementById("status").dataset.state), {}, wanted);
const press = (name) => page.keyboard.press(name);
const settle = () => new Promise((resolve) => setTimeout(resolve, SETTLE_MS));

async function look(name, scheme = "light") {
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  await settle();
  await page.screenshot({ path: path.join(folder, `${name}.png`) });
}

// Rules of accessibility that the page breaks.
async function check(name) {
  await page.evaluate(axe.source);
  const { violations } = await page.evaluate(() => window.axe.run());
  found.violations[name] = violations.map(({ id, nodes }) => [id, ...nodes.map((node) => node.html)]);
}

async function write(text) {
  await page.focus("#message");
  await page.keyboard.type(text);
  await press("Enter");
}

// Presses Tab until the focus is on an element.
async function tabTo(id) {
  for (let at = 0; at < 30; at++) {
    if (await page.evaluate((wanted) => document.activeElement?.id === wanted, id)) return;
    await press("Tab");
  }
  throw new Error(`Tab does not reach #${id}`);
}

// Ends the recording, and begins another one.
async function keepSound() {
  const data = await page.evaluate(
    () =>
      new Promise((resolve) => {
        window.recorder.ondataavailable = async ({ data }) => {
          const reader = new FileReader();
          reader.onload = () => resolve(reader.result.split(",")[1]);
          reader.readAsDataURL(data);
        };
        window.recorder.stop();
        window.recorder.start();
      }),
  );
  const file = path.join(folder, `sound-${found.sounds.length}.webm`);
  fs.writeFileSync(file, Buffer.from(data, "base64"));
  found.sounds.push(file);
}

// Keeps the words, notes and stages of the turns.
async function keepTurns() {
  found.conversations.push(
    await page.$$eval(".turn", (turns) =>
      turns.map((turn) => ({
        role: turn.classList.contains("user") ? "user" : "model",
        words: turn.querySelector(".words").textContent,
        note: turn.querySelector(".note").textContent,
        stages: [...turn.querySelectorAll(".timeline th")].map((row) => row.textContent),
      })),
    ),
  );
}

async function beginAgain() {
  await keepTurns();
  await tabTo("new");
  await press("Enter");
  await page.waitForSelector("#empty:not([hidden])");
}

const answered = (count) =>
  page.waitForFunction(
    (wanted) => document.querySelectorAll(".turn.model:not(.waiting)").length >= wanted,
    {},
    count,
  );

async function conversation() {
  await page.waitForSelector("#key-form:not([hidden])");
  await page.keyboard.type("wrong");
  await press("Enter");
  await page.waitForSelector("#alert:not([hidden])");
  found.refusal = await page.$eval("#alert-text", (text) => text.textContent);
  await check("error");
  await look("error");
  await page.$eval("#key", (field) => (field.value = ""));
  await page.focus("#key");
  await page.keyboard.type(key);
  await press("Enter");
  await until(["ready"]);
  await page.waitForSelector("#replicas tbody tr");
  await check("light");
  await look("idle-dark", "dark");
  await check("dark");
  await look("idle-light");

  await write("say seven blue left");
  await answered(1);
  await until(["ready"]);
  await keepSound();

  await beginAgain();
  await write("say one two three four five");
  await until(["answer"]);
  await tabTo("talk");
  await press("Space");
  await until(["you"]);
  await look("listening");
  await page.waitForFunction(() => document.querySelectorAll(".turn.model").length === 2);
  await until(["answer"]);
  await answered(2);
  await look("answering");
  await until(["listen"]);
  await press("Space");
  await until(["ready"]);
  await keepSound();
  const sent = await page.evaluate(() => window.sent);
  const file = path.join(folder, "sent.pcm");
  fs.writeFileSync(file, Buffer.concat(sent.map((audio) => Buffer.from(audio, "base64"))));

  await beginAgain();
  await write("say one two three four five");
  await until(["answer"]);
  await settle();
  await settle();
  await settle();
  await press("Escape");
  await until(["ready"]);
  await answered(1);
  await page.waitForSelector(".note.interrupted");
  await settle();
  await look("interrupted-dark", "dark");
  await check("interrupted-dark");
  await look("interrupted");
  await check("interrupted");
}

async function pictures() {
  await until(["ready"]);
  await tabTo("message");
  await page.keyboard.down("Shift");
  await press("Tab"); // the buttons before the message are hidden
  await page.keyboard.up("Shift");
  await press("ArrowRight"); // the kind of answer
  await write("a red fox");
  await page.waitForSelector("img.partial");
  await look("pictures-preview");
  await answered(1);
  await look("pictures");
  await check("pictures");
  found.size = await page.$eval(".pictures img", (image) => [image.naturalWidth, image.naturalHeight]);
  found.previews = await page.evaluate(() => window.pictures.size);
}

try {
  await page.goto(url);
  await { conversation, pictures }[scenario]();
} catch (error) {
  await page.screenshot({ path: path.join(folder, "failed.png") });
  found.failed = `${error.stack}; state ${await state()}`;
}
await keepTurns();
found.alert = await page.$eval("#alert:not([hidden]) #alert-text", (text) => text.textContent).catch(() => null);
Object.assign(
  found,
  await page.evaluate(() => ({
    refused: window.refused,
    stored: [localStorage.length, sessionStorage.length, document.cookie],
    replicas: [...document.querySelectorAll("#replicas tbody tr")].map((row) => row.innerText.split(/\s+/)),
  })),
);
await browser.close();
console.log(JSON.stringify(found));
