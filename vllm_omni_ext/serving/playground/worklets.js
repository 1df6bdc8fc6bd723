// Processors of the audio threads: `capture` resamples the microphone and sends pieces, `playback` plays a queue.

const TAPS = 24; // input samples on each side of an output sample, of the filter before the rate is reduced
const PHASES = 128;
const REPORT = 2400; // samples between two reports of the playback

class Capture extends AudioWorkletProcessor {
  // options: rate of the output in Hz, samples of a piece
  constructor({ processorOptions: { rate, piece } }) {
    super();
    this.step = sampleRate / rate;
    this.piece = piece;
    this.table = filter(Math.min(1, 1 / this.step));
    this.input = new Float32Array(2 * TAPS);
    this.at = TAPS; // position of the next output sample in `input`
    this.out = new Int16Array(piece);
    this.count = 0;
    this.peak = 0;
  }

  process([[channel]]) {
    if (channel) {
      const joined = new Float32Array(this.input.length + channel.length);
      joined.set(this.input);
      joined.set(channel, this.input.length);
      while (this.at + TAPS < joined.length) {
        this.push(sample(joined, this.at, this.table));
        this.at += this.step;
      }
      const keep = Math.max(0, Math.floor(this.at) - TAPS);
      this.input = joined.slice(keep);
      this.at -= keep;
    }
    return true;
  }

  push(value) {
    const clipped = Math.max(-1, Math.min(1, value));
    this.peak = Math.max(this.peak, Math.abs(clipped));
    this.out[this.count++] = Math.round(clipped * 32767);
    if (this.count === this.piece) {
      this.port.postMessage({ samples: this.out, peak: this.peak }, [this.out.buffer]);
      this.out = new Int16Array(this.piece);
      this.count = this.peak = 0;
    }
  }
}

// Windowed sinc, row by row for fractions of an input sample; `cutoff` is 1 for half the input rate.
function filter(cutoff) {
  const rows = [];
  for (let phase = 0; phase <= PHASES; phase++) {
    const row = new Float32Array(2 * TAPS);
    let sum = 0;
    for (let tap = 0; tap < 2 * TAPS; tap++) {
      const x = tap - TAPS + 1 - phase / PHASES;
      const angle = Math.PI * cutoff * x;
      const window = Math.abs(x) < TAPS ? 0.5 + 0.5 * Math.cos((Math.PI * x) / TAPS) : 0;
      row[tap] = (x === 0 ? 1 : Math.sin(angle) / angle) * window;
      sum += row[tap];
    }
    rows.push(row.map((value) => value / sum));
  }
  return rows;
}

function sample(input, at, table) {
  const whole = Math.floor(at);
  const row = table[Math.round((at - whole) * PHASES)];
  let sum = 0;
  for (let tap = 0; tap < 2 * TAPS; tap++) sum += row[tap] * input[whole - TAPS + 1 + tap];
  return sum;
}

class Playback extends AudioWorkletProcessor {
  constructor() {
    super();
    this.queue = []; // {id, samples, at}; samples null: the end of a sound
    this.played = 0; // samples of the sound `id`
    this.id = null;
    this.reported = 0;
    this.port.onmessage = ({ data }) => (data.stop ? this.stop() : this.queue.push({ ...data, at: 0 }));
  }

  stop() {
    this.queue = [];
    this.report("stopped");
  }

  report(kind) {
    this.reported = this.played;
    this.port.postMessage({ kind, id: this.id, played: this.played });
  }

  process(_, [[out]]) {
    let filled = 0;
    while (filled < out.length && this.queue.length) {
      const first = this.queue[0];
      if (first.id !== this.id) [this.id, this.played, this.reported] = [first.id, 0, 0];
      if (first.samples === null) {
        this.queue.shift();
        this.report("ended");
        continue;
      }
      if (this.played === 0) this.report("began");
      const count = Math.min(out.length - filled, first.samples.length - first.at);
      out.set(first.samples.subarray(first.at, first.at + count), filled);
      filled += count;
      first.at += count;
      this.played += count;
      if (first.at === first.samples.length) this.queue.shift();
      if (this.played - this.reported >= REPORT) this.report("playing");
    }
    return true;
  }
}

registerProcessor("capture", Capture);
registerProcessor("playback", Playback);
