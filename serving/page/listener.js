// Listens to the hits of one watch, whoever sends the frames. Reconnects if the connection is lost.
import { connect } from "./sockets.js";

const TRIES = 5;
const MILLISECONDS = 1500;

export class Listener {
  #socket = null;
  #timer = 0;
  #isOver = false;
  #tries = 0;

  // `told`: handlers { hit(said), dropped(count), state(words, isOver) }.
  constructor(tokens, watchId, told) {
    const path = `v1/watches/${encodeURIComponent(watchId)}/live`;
    const open = () => {
      const end = ({ message }) => {
        if (this.#isOver) return;
        this.#tries += 1;
        const isOver = this.#tries > TRIES;
        told.state(isOver ? message : `${message}: listening again soon`, isOver);
        if (!isOver) this.#timer = setTimeout(open, MILLISECONDS * this.#tries);
      };
      this.#socket = connect(path, tokens.current, { hear: (said) => this.#hear(said, told), end });
    };
    open();
  }

  stop() {
    this.#isOver = true;
    clearTimeout(this.#timer);
    this.#socket?.close();
  }

  #hear(said, told) {
    this.#tries = 0;
    if (said.listening) told.state("listening", false);
    else if (said.dropped) told.dropped(said.dropped);
    else if (said.end) {
      this.#isOver = true;
      told.state(`it has ${said.end === "deleted" ? "been deleted" : "expired"}`, true);
    } else if (said.watch) told.hit(said);
  }
}
