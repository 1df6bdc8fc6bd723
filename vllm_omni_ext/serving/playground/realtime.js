// One session of /v1/realtime: the WebSocket, and the events of the protocol.

import { ServerError } from "./server.js";

const SECRETS = "v1/realtime/client_secrets";
const HARMLESS = new Set(["response_cancel_not_active"]); // an interruption that comes after the end

export class Realtime {
  // on: functions by type of event, and `closed(error)`, error null after `close()`
  constructor(server, model, on) {
    Object.assign(this, { server, model, on });
    this.socket = null;
    this.session = null;
  }

  get open() {
    return this.session !== null;
  }

  // Connects, with an ephemeral key if there is an API key; returns when the session has begun.
  async connect(settings) {
    const protocols = ["realtime"];
    if (this.server.key()) {
      const secret = await this.server.json(SECRETS, { body: { session: { type: "realtime", model: this.model } } });
      protocols.push(`openai-insecure-api-key.${secret.value}`);
    }
    const url = new URL("v1/realtime", document.baseURI);
    url.protocol = url.protocol.replace("http", "ws");
    url.search = new URLSearchParams({ model: this.model, return_stage_metrics: "true" });
    const socket = new WebSocket(url, protocols);
    this.socket = socket;
    await new Promise((resolve, reject) => {
      socket.onmessage = ({ data }) => {
        const event = JSON.parse(data);
        if (event.type === "session.created") {
          this.session = event.session;
          this.send("session.update", { session: { type: "realtime", ...settings } });
          resolve();
        }
        this.take(event);
      };
      socket.onclose = ({ code, reason }) => {
        const was = this.session;
        this.session = null;
        const why = reason ? `${reason}, code ${code}` : `code ${code}`;
        const error = new ServerError(
          was
            ? `The server has closed the session (${why}). The next message opens another one.`
            : "The server has refused the session: it is shutting down, or has too many sessions.",
        );
        if (this.socket !== socket) return;
        this.socket = null;
        if (was) this.on.closed(error);
        else reject(error);
      };
    });
  }

  take(event) {
    if (event.type === "session.updated") this.session = event.session;
    if (event.type === "error" && HARMLESS.has(event.error.code)) return;
    this.on[event.type]?.(event);
  }

  send(type, fields = {}) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify({ type, ...fields }));
  }

  close() {
    const socket = this.socket;
    this.socket = this.session = null;
    socket?.close();
  }

  say(role, text) {
    const type = role === "user" ? "input_text" : "output_text";
    this.send("conversation.item.create", { item: { type: "message", role, content: [{ type, text }] } });
  }
}
