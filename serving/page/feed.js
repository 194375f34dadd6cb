// A feed: sends frames from this page, one after the other, to the server's watches.
import { bytes } from "./numbers.js";
import { connect } from "./sockets.js";

const FRAMES_AHEAD = 4;

export class Feed {
  #tokens;
  #name;
  #mostBytes;
  #told;
  #socket = null;
  #waiting = [];
  #sent = new Map();
  #number = 0;
  #run = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;

  // `mostBytes`: the server's limit per frame. `told`: handlers { hit(said, frame), refused(frame,
  // message), answered(), ended(message) }.
  constructor(tokens, name, mostBytes, told) {
    [this.#tokens, this.#name, this.#mostBytes, this.#told] = [tokens, name, mostBytes, told];
  }

  get numOpen() {
    return this.#waiting.length + this.#sent.size;
  }

  // Whether a hit is of a frame that this page sent, and is therefore already reported here.
  isOwn({ frame }) {
    return String(frame).startsWith(this.#run);
  }

  // `content`: a File, a Blob or a text.
  send({ name, content, fault }) {
    const frame = { id: `${this.#run} ${(this.#number += 1)}`, name, content, time: Date.now() / 1000 };
    if (fault || content.size > this.#mostBytes) {
      this.#told.refused(frame, fault ?? `is over ${bytes(this.#mostBytes)}, the most of a frame`);
      return;
    }
    this.#waiting.push(frame);
    this.#go();
  }

  close() {
    this.#waiting = [];
    this.#sent.clear();
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }

  #go() {
    if (this.#socket === null) {
      this.#open();
    } else if (this.#socket.readyState === WebSocket.OPEN) {
      while (this.#waiting.length && this.#sent.size < FRAMES_AHEAD) this.#pass(this.#waiting.shift());
    }
  }

  #open() {
    const path = `v1/feeds/${encodeURIComponent(this.#name)}/frames?acknowledge=true`;
    let socket = null;
    socket = connect(path, this.#tokens.current, {
      hear: (said) => this.#hear(said),
      end: ({ message }) => {
        if (socket && socket !== this.#socket) return; // closed by this page
        const hadOpen = this.numOpen > 0;
        this.#socket = null;
        this.#waiting = [];
        this.#sent.clear();
        if (hadOpen) this.#told.ended(message); // otherwise it was idle; the next frame reopens it
      },
    });
    this.#socket = socket;
    socket?.addEventListener("open", () => this.#go());
  }

  async #pass(frame) {
    this.#sent.set(frame.id, frame);
    const { id, time, content } = frame;
    let said = { text: content };
    if (typeof content !== "string") {
      try {
        said = { image: await base64(content) };
      } catch (error) {
        if (this.#sent.delete(id)) this.#told.refused(frame, `cannot be read: ${error.message}`);
        this.#go();
        return;
      }
    }
    if (this.#sent.has(id)) this.#socket?.send(JSON.stringify({ id, time, ...said }));
  }

  #hear(said) {
    const frame = this.#sent.get(said.answered ?? said.frame);
    if (said.watch !== undefined) {
      this.#told.hit(said, frame);
    } else if (frame) {
      this.#sent.delete(frame.id);
      if (said.error) this.#told.refused(frame, said.error.message);
      else this.#told.answered();
      this.#go();
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
