// The visible parts: turns with their timelines, and the table of replicas. No requests are sent here.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const hundredths = (value) => value.toFixed(2).replace("-0.00", "0.00");
const seconds = (value) => `${hundredths(value)} s`;

// A turn of the user; a spoken one gets its words later.
export class Said {
  constructor(list, text = null) {
    this.words = text ?? "";
    this.body = element("p", { className: "words" }, text ?? "…");
    this.note = element("span", { className: "note" });
    this.began = performance.now();
    this.ended = null;
    this.spoken = text === null;
    const head = element("h3", {}, "You", this.note);
    this.node = element("li", { className: "turn user" }, head, this.body);
    this.wait(this.spoken);
    list.append(this.node);
  }

  // Screen readers read a turn when it is complete.
  wait(on) {
    this.node.classList.toggle("waiting", on);
    this.node.ariaBusy = String(on);
  }

  add(delta) {
    this.set(this.words + delta);
  }

  set(text) {
    this.words = text;
    this.body.textContent = text || "(no words)";
    this.wait(false);
  }

  remark(text) {
    this.note.textContent = text;
  }
}

// An answer: its words, pictures and timeline.
export class Answer {
  constructor(list, asked = null) {
    this.words = "";
    this.item = null; // id of the sound
    this.zero = performance.now();
    this.silenced = false;
    this.voiced = false; // some of its sound has arrived
    this.heard = { began: null, ended: null };
    this.rows = new Map();
    this.note = element("span", { className: "note" });
    this.body = element("p", { className: "words" });
    this.gallery = element("div", { className: "pictures", hidden: true });
    this.figures = element("ul", { className: "figures" });
    this.table = element("tbody");
    const caption = "Stages of this answer, in seconds from the end of your turn";
    const timeline = element(
      "details",
      { className: "timeline", open: true },
      element("summary", {}, "Timeline"),
      element("table", {}, element("caption", { className: "hidden" }, caption), this.table),
    );
    this.timeline = timeline;
    timeline.hidden = true;
    timeline.setAttribute("aria-live", "off");
    this.asked = asked;
    const head = element("h3", {}, "Model", this.note);
    this.node = element("li", { className: "turn model waiting", ariaBusy: "true" }, head, this.body, this.gallery, this.figures, timeline);
    if (asked?.spoken) {
      this.row("you", { from: asked.began, to: asked.ended ?? this.zero, kind: "you", about: "you speak" });
    }
    list.append(this.node);
  }

  add(delta) {
    this.set(this.words + delta);
    const now = performance.now();
    this.row("text", { from: this.rows.get("text")?.from ?? now, to: now, kind: "live", about: "text arrives" });
  }

  set(words) {
    this.words = words;
    this.body.textContent = words;
  }

  // Sound has arrived; its playing is reported by `playing`.
  sound() {
    this.voiced = true;
    const now = performance.now();
    this.row("sound", { from: this.rows.get("sound")?.from ?? now, to: now, kind: "live", about: "sound arrives" });
  }

  playing(kind) {
    const now = performance.now();
    this.heard.began ??= now;
    if (kind !== "playing" && kind !== "began") this.heard.ended ??= now;
    this.row("you hear", { from: this.heard.began, to: this.heard.ended ?? now, kind: "heard", about: "sound plays" });
  }

  get audible() {
    return this.voiced && this.heard.ended === null;
  }

  progress({ stage, done, total }) {
    this.bar ??= element("progress");
    this.bar.max = total;
    this.bar.value = done;
    this.bar.setAttribute("aria-label", `Steps of ${stage}`);
    this.remark(`step ${done} of ${total}`);
    if (!this.bar.isConnected) this.gallery.before(this.bar);
  }

  async picture(dataUrl, partial) {
    const [, type, base64] = dataUrl.match(/^data:([^;,]*);base64,(.*)$/s);
    const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    this.preview ??= element("img");
    const image = this.preview;
    if (image.src) URL.revokeObjectURL(image.src);
    image.src = URL.createObjectURL(new Blob([bytes], { type }));
    image.alt = `${partial ? "Preview" : "Picture"}: ${this.asked?.words ?? ""}`;
    image.className = partial ? "partial" : "";
    this.gallery.hidden = false;
    if (!image.isConnected) this.gallery.append(image);
    if (!partial) this.preview = null;
    const now = performance.now();
    this.row("pictures", { from: this.rows.get("pictures")?.from ?? now, to: now, kind: "live", about: "pictures arrive" });
    await image.decode();
  }

  remark(text, kind = "") {
    this.note.textContent = text;
    this.note.className = `note ${kind}`.trim();
  }

  // metrics: `metrics` of an answer of the server
  end(metrics = null) {
    this.node.classList.remove("waiting");
    this.node.ariaBusy = "false";
    if (this.bar) {
      this.bar.remove();
      if (this.note.className === "note") this.remark("");
    }
    if (metrics?.stages) this.stages(metrics);
    if (!this.words && this.gallery.hidden && !this.note.textContent) this.remark("(no answer)");
    this.draw();
  }

  stages(metrics) {
    const at = (value) => this.zero + 1000 * value;
    for (const name of ["text", "sound", "pictures"]) this.rows.delete(name);
    const hear = this.rows.get("you hear");
    this.rows.delete("you hear");
    for (const [name, each] of Object.entries(metrics.stages)) {
      const last = each.last_output_s ?? each.first_output_s ?? each.queued_s;
      const about = [each.replica, each.tokens ? `${each.tokens} ${each.tokens === 1 ? "token" : "tokens"}` : null].filter(Boolean).join(", ");
      const row = { from: at(each.queued_s), first: at(each.first_output_s ?? last), to: at(last), kind: "stage", about };
      this.rows.set(name, row);
    }
    if (hear) this.rows.set("you hear", hear);
    const first = Object.values(metrics.stages)[0]?.first_output_s;
    const facts = [
      typeof first === "number" ? ["first output", seconds(first)] : null,
      metrics.audio?.first_s ? ["first sound", seconds(metrics.audio.first_s)] : null,
      metrics.audio ? ["sound made", seconds(metrics.audio.seconds)] : null,
      metrics.image?.last_s ? ["picture after", seconds(metrics.image.last_s)] : null,
    ].filter(Boolean);
    this.figures.replaceChildren(...facts.map(([name, value]) => element("li", {}, element("b", {}, value), ` ${name}`)));
  }

  row(name, row) {
    this.rows.set(name, row);
    this.draw();
  }

  draw() {
    const rows = [...this.rows].filter(([, row]) => Number.isFinite(row.to));
    if (!rows.length) return;
    const begin = Math.min(this.zero, ...rows.map(([, row]) => row.from));
    const span = Math.max(...rows.map(([, row]) => row.to), this.zero + 100) - begin;
    let number = 0;
    this.table.replaceChildren(
      ...rows.map(([name, row]) => {
        const bar = element("div", { className: `bar ${row.kind}` });
        if (row.kind === "stage") bar.classList.add(`s${number++ % 5}`);
        const part = (value) => `${(100 * value) / span}%`;
        bar.style.setProperty("--from", part(row.from - begin));
        bar.style.setProperty("--length", part(row.to - row.from));
        if (row.first) {
          const waits = (100 * (row.first - row.from)) / Math.max(row.to - row.from, 1);
          bar.style.setProperty("--waits", `${Math.min(waits, 100)}%`);
        }
        const track = element("td", { className: "track" }, bar);
        track.setAttribute("aria-hidden", "true");
        track.style.setProperty("--zero", part(this.zero - begin));
        const times = `${hundredths((row.from - this.zero) / 1000)} to ${seconds((row.to - this.zero) / 1000)}`;
        const title = element("th", { scope: "row" }, name);
        return element("tr", {}, title, track, element("td", { className: "times" }, times), element("td", {}, row.about));
      }),
    );
    this.timeline.hidden = false;
  }
}

// Keeps the end of a list in sight while it grows, unless the user has scrolled away from it.
export function follow(list) {
  const box = list.parentElement;
  let atEnd = true;
  let before = 0;
  box.addEventListener("scroll", () => {
    if (box.scrollTop < before) atEnd = false;
    if (box.scrollHeight - box.scrollTop - box.clientHeight < 40) atEnd = true;
    before = box.scrollTop;
  });
  const grown = new ResizeObserver(() => {
    if (atEnd) box.scrollTop = box.scrollHeight;
  });
  grown.observe(list);
  grown.observe(box);
}

export class Replicas {
  constructor(table, summary) {
    this.body = table.tBodies[0];
    this.summary = summary;
    this.before = null;
  }

  show(now) {
    const { before } = this;
    const passed = before ? (now.at - before.at) / 1000 : 0;
    const rows = now.status.stages.flatMap((stage) => stage.replicas);
    this.body.replaceChildren(
      ...rows.map((each) => {
        const made = (now.tokens[each.id] ?? NaN) - (before?.tokens[each.id] ?? NaN);
        const rate = passed && made >= 0 ? (made / passed).toFixed(1) : "–";
        const state = element("td", {}, element("span", { className: `state ${each.state.toLowerCase()}` }, each.state));
        const numbers = [each.running, each.waiting, rate, each.restarts].map((value) =>
          element("td", { className: "number" }, String(value)),
        );
        return element("tr", {}, element("th", { scope: "row", title: `process ${each.pid} on ${each.host}` }, each.id), state, ...numbers);
      }),
    );
    const servers = now.status.api_servers.filter((each) => each.state === "UP").length;
    const minutes = Math.floor(now.status.uptime_s / 60);
    const up = minutes ? `${minutes} min` : `${Math.floor(now.status.uptime_s)} s`;
    this.summary.textContent = `Up ${up}, ${servers} API ${servers === 1 ? "server" : "servers"}.`;
    this.before = now;
  }

  fail(message) {
    this.summary.textContent = message;
    this.body.replaceChildren();
    this.before = null;
  }
}
