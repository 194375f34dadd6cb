// Receives the hits of one watch, regardless of who sends the frames. Reconnects if the connection
// is lost.
import { connect } from "./sockets.js";

const MAX_ATTEMPTS = 5;
const DELAY_MILLISECONDS = 1500;

export class Listener {
  #socket = null;
  #timer = 0;
  #isClosed = false;
  #numAttempts = 0;
  #cursor = null; // of the last hit

  // `handlers`: { hit(hit), dropped(count), state(text, isOver) }.
  constructor(tokens, watchId, handlers) {
    const path = () => `v1/watches/${encodeURIComponent(watchId)}/live${this.#cursor === null ? "" : `?after=${this.#cursor}`}`;
    const open = () => {
      const onClose = ({ message }) => {
        if (this.#isClosed) return;
        this.#numAttempts += 1;
        const isOver = this.#numAttempts > MAX_ATTEMPTS;
        handlers.state(isOver ? message : `${message}; reconnecting…`, isOver);
        if (!isOver) this.#timer = setTimeout(open, DELAY_MILLISECONDS * this.#numAttempts);
      };
      this.#socket = connect(path(), tokens.current, { onMessage: (message) => this.#receive(message, handlers), onClose });
    };
    open();
  }

  stop() {
    this.#isClosed = true;
    clearTimeout(this.#timer);
    this.#socket?.close();
  }

  #receive(message, handlers) {
    this.#numAttempts = 0;
    this.#cursor = message.cursor ?? this.#cursor;
    if (message.listening) handlers.state("listening", false);
    else if (message.dropped) handlers.dropped(message.dropped);
    else if (message.end) {
      this.#isClosed = true;
      handlers.state(`this watch ${message.end === "deleted" ? "was deleted" : "has expired"}`, true);
    } else if (message.watch) handlers.hit(message);
  }
}
