// The microphone, and the playing of answers. All sound has 16 bits and one channel.

export const RATE = 24000;
const PIECE = 960; // samples of the microphone in one event: 40 ms
const MODULE = new URL("worklets.js", import.meta.url);

export class Microphone {
  // take(base64): receives each piece; level(peak): 0 to 1; ended(): the device is gone
  constructor({ take, level, ended }) {
    Object.assign(this, { take, level, ended });
    this.context = null;
  }

  get on() {
    return this.context !== null;
  }

  async start() {
    if (!navigator.mediaDevices) {
      throw new Error("The browser gives the microphone to pages of https:// and of localhost only. Type instead.");
    }
    const audio = { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true };
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio });
    } catch (error) {
      throw new Error(REASONS[error.name] ?? `The microphone cannot be opened: ${error.message}`);
    }
    const context = new AudioContext({ latencyHint: "interactive" });
    await context.audioWorklet.addModule(MODULE);
    const processorOptions = { rate: RATE, piece: PIECE };
    const node = new AudioWorkletNode(context, "capture", { numberOfOutputs: 0, channelCount: 1, processorOptions });
    node.port.onmessage = ({ data: { samples, peak } }) => {
      if (this.context !== context) return;
      this.level(peak);
      this.take(toBase64(samples));
    };
    context.createMediaStreamSource(stream).connect(node);
    stream.getAudioTracks()[0].onended = () => this.context === context && this.ended();
    this.context = context;
    this.stream = stream;
  }

  stop() {
    const { context, stream } = this;
    this.context = this.stream = null;
    for (const track of stream?.getTracks() ?? []) track.stop();
    context?.close();
    this.level(0);
  }
}

const REASONS = {
  NotAllowedError: "The microphone is not allowed for this page. Allow it in the browser's settings, or type instead.",
  NotFoundError: "There is no microphone. Type instead.",
  NotReadableError: "Another program uses the microphone, or it is broken.",
};

export class Player {
  // changed(kind, id, ms): kind is "began", "playing" or "ended"; ms is the played length of the sound `id`
  constructor(changed) {
    this.changed = changed;
    this.context = null;
    this.stopped = [];
  }

  // To be called in the handler of a click or key: browsers play no sound before.
  async unlock(rate = RATE) {
    if (this.context?.sampleRate !== rate) {
      this.context?.close();
      const context = new AudioContext({ sampleRate: rate, latencyHint: "interactive" });
      this.context = context;
      this.node = context.audioWorklet.addModule(MODULE).then(() => {
        const node = new AudioWorkletNode(context, "playback", { numberOfInputs: 0, outputChannelCount: [1] });
        node.port.onmessage = ({ data }) => this.report(data);
        node.connect(context.destination);
        return node;
      });
    }
    if (this.context.state === "suspended") this.context.resume();
    return this.node;
  }

  report({ kind, id, played }) {
    // The device plays later than the audio thread computes.
    const late = kind === "ended" ? 0 : this.context.outputLatency || 0;
    const ms = Math.max(0, (played / this.context.sampleRate - late) * 1000);
    if (kind === "stopped") this.stopped.shift()({ id, ms });
    else this.changed(kind, id, ms);
  }

  // samples: float32
  async play(id, samples, rate = RATE) {
    (await this.unlock(rate)).port.postMessage({ id, samples }, [samples.buffer]);
  }

  async end(id) {
    (await this.node)?.port.postMessage({ id, samples: null });
  }

  // Drops sound that is not played yet; returns the sound that was played last, and the milliseconds of it.
  async stop() {
    const node = await this.node;
    if (!node) return { id: null, ms: 0 };
    return new Promise((resolve) => {
      this.stopped.push(resolve);
      node.port.postMessage({ stop: true });
    });
  }
}

// Samples of a stream of base64, whose pieces may end within a sample.
export class Pcm16 {
  constructor() {
    this.rest = "";
  }

  samples(base64) {
    const text = this.rest + atob(base64);
    const count = text.length >> 1;
    this.rest = text.slice(2 * count);
    const samples = new Float32Array(count);
    for (let at = 0; at < count; at++) {
      samples[at] = (((text.charCodeAt(2 * at) | (text.charCodeAt(2 * at + 1) << 8)) << 16) >> 16) / 32768;
    }
    return samples;
  }
}

function toBase64(samples) {
  return btoa(String.fromCharCode(...new Uint8Array(samples.buffer)));
}
