// Requests to the server: facts, models, replicas, chats.

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export class Server {
  // key(): the API key, or ""
  constructor(key) {
    this.key = key;
  }

  async request(path, { body, signal, keyless = false } = {}) {
    const headers = {};
    if (this.key() && !keyless) headers.Authorization = `Bearer ${this.key()}`;
    if (body) headers["Content-Type"] = "application/json";
    let answer;
    try {
      answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server does not answer. Is it running, and is the network up?");
    }
    if (!answer.ok) throw await errorOf(answer);
    return answer;
  }

  async json(path, options) {
    return (await this.request(path, options)).json();
  }

  // Yields the chunks of a streamed chat.
  async *chat(body, signal) {
    const answer = await this.request("v1/chat/completions", { body: { ...body, stream: true }, signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ServerError(chunk.error.message, chunk.error.code);
        yield chunk;
      }
    }
  }

  // Returns the status, and the tokens generated until now by replica.
  async replicas() {
    const [status, metrics] = await Promise.all([this.json("v1/omni/status"), this.request("metrics")]);
    const tokens = {};
    for (const line of (await metrics.text()).split("\n")) {
      const found = line.match(/^vllm:generation_tokens_total\{(.*)\} (\S+)$/);
      const replica = found?.[1].match(/(?:^|,)replica="([^"]*)"/)?.[1];
      if (replica) tokens[replica] = (tokens[replica] ?? 0) + Number(found[2]);
    }
    return { status, tokens, at: performance.now() };
  }
}

async function errorOf(answer) {
  let message = answer.statusText;
  try {
    const { error, detail } = await answer.json();
    message = error?.message ?? (typeof detail === "string" ? detail : message);
  } catch {
    // The body is not JSON: the status remains.
  }
  return new ServerError(`${message || "The request failed"} (status ${answer.status})`, answer.status);
}
