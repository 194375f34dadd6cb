// A feed: sends frames from this page to the server, which checks them against its watches.
import { bytes } from "./numbers.js";
import { connect } from "./sockets.js";

const MAX_FRAMES_IN_FLIGHT = 4;

export class Feed {
  #tokens;
  #name;
  #maxBytes;
  #handlers;
  #socket = null;
  #queue = [];
  #inFlight = new Map();
  #numFrames = 0;
  #runId = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;

  // `maxBytes`: the server's limit per frame. `handlers`: { hit(hit, frame), rejected(frame,
  // message), processed(), closed(message) }.
  constructor(tokens, name, maxBytes, handlers) {
    [this.#tokens, this.#name, this.#maxBytes, this.#handlers] = [tokens, name, maxBytes, handlers];
  }

  get numPending() {
    return this.#queue.length + this.#inFlight.size;
  }

  // Whether a hit belongs to a frame that this page sent. If so, the feed has already reported it.
  isOwn({ frame }) {
    return String(frame).startsWith(this.#runId);
  }

  // `content`: a File, a Blob or a string.
  send({ name, content, inputError }) {
    const frame = { id: `${this.#runId} ${(this.#numFrames += 1)}`, name, content, time: Date.now() / 1000 };
    if (inputError || content.size > this.#maxBytes) {
      this.#handlers.rejected(frame, inputError ?? `larger than the limit of ${bytes(this.#maxBytes)} per frame`);
      return;
    }
    this.#queue.push(frame);
    this.#sendQueued();
  }

  close() {
    this.#queue = [];
    this.#inFlight.clear();
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }

  #sendQueued() {
    if (this.#socket === null) {
      this.#open();
    } else if (this.#socket.readyState === WebSocket.OPEN) {
      while (this.#queue.length && this.#inFlight.size < MAX_FRAMES_IN_FLIGHT) this.#sendFrame(this.#queue.shift());
    }
  }

  #open() {
    const path = `v1/feeds/${encodeURIComponent(this.#name)}/frames?acknowledge=true`;
    let socket = null;
    socket = connect(path, this.#tokens.current, {
      onMessage: (message) => this.#receive(message),
      onClose: ({ message }) => {
        if (socket && socket !== this.#socket) return; // closed by this page
        const hadPending = this.numPending > 0;
        this.#socket = null;
        this.#queue = [];
        this.#inFlight.clear();
        if (hadPending) this.#handlers.closed(message); // if idle, the next frame reopens the connection
      },
    });
    this.#socket = socket;
    socket?.addEventListener("open", () => this.#sendQueued());
  }

  async #sendFrame(frame) {
    this.#inFlight.set(frame.id, frame);
    const { id, time, content } = frame;
    let input = { text: content };
    if (typeof content !== "string") {
      try {
        input = { image: await base64(content) };
      } catch (error) {
        if (this.#inFlight.delete(id)) this.#handlers.rejected(frame, `cannot be read: ${error.message}`);
        this.#sendQueued();
        return;
      }
    }
    if (this.#inFlight.has(id)) this.#socket?.send(JSON.stringify({ id, time, ...input }));
  }

  #receive(message) {
    const frame = this.#inFlight.get(message.answered ?? message.frame);
    if (message.watch !== undefined) {
      this.#handlers.hit(message, frame);
    } else if (frame) {
      this.#inFlight.delete(frame.id);
      if (message.error) this.#handlers.rejected(frame, message.error.message);
      else this.#handlers.processed();
      this.#sendQueued();
    }
  }
}

async function base64(blob) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
  return url.slice(url.indexOf(",") + 1);
}
