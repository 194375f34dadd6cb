// Requests to the server of this page. They carry the token, are retried while the server is busy,
// and throw its errors.
import { byId } from "./elements.js";

const LONGEST_PAUSE_SECONDS = 60;
const TRIES_WHILE_AWAY = 4;
// The code of a 429 that retrying does not resolve: this client has too many watches.
const FOR_GOOD = "too_many_watches";

// A request that the server rejected: `code` is machine-readable, the message is for people.
export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    Object.assign(this, { status, code });
  }
}

export const address = (path) => new URL(path, document.baseURI);

export class Api {
  #waiting = 0;

  constructor(tokens) {
    this.tokens = tokens;
  }

  // `body` is sent as JSON, or as a form if it is FormData. `once`: the request is not idempotent,
  // so it is not retried if there is no response. Resolves to the JSON of the response.
  async ask(method, path, { body, signal, once } = {}) {
    return (await this.fetch(method, path, { body, signal, once })).json();
  }

  async fetch(method, path, { body, signal, once = false } = {}) {
    for (let away = 1; ; ) {
      const token = this.tokens.current;
      const answer = await this.#once(method, path, { body, signal, token });
      if (answer?.ok) return answer;
      const refusal = answer ? await refusalOf(answer) : unreachable();
      if (answer?.status === 401) {
        await this.tokens.other(token);
      } else if (answer?.status === 429 && refusal.code !== FOR_GOOD) {
        await this.#pause(pauseOf(answer, 1), `The server is busy (${refusal.message})`, signal);
      } else if (isAway(answer) && !once && away < TRIES_WHILE_AWAY) {
        await this.#pause(pauseOf(answer, away), `No answer (${refusal.message})`, signal);
        away += 1;
      } else {
        throw refusal;
      }
    }
  }

  // The response, or null if there was none. Rethrows an abort.
  async #once(method, path, { body, signal, token }) {
    const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
    const isForm = body instanceof FormData;
    if (body !== undefined && !isForm) headers["Content-Type"] = "application/json";
    const sent = body === undefined || isForm ? body : JSON.stringify(body);
    try {
      return await fetch(address(path), { method, headers, body: sent, signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      return null;
    }
  }

  async #pause(seconds, why, signal) {
    this.#waiting += 1;
    byId("waiting").textContent = `${why}: this page asks again in ${Math.ceil(seconds)} s.`;
    byId("waiting").hidden = false;
    try {
      await slept(seconds, signal);
    } finally {
      this.#waiting -= 1;
      byId("waiting").hidden = this.#waiting === 0;
    }
  }
}

function slept(seconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => reject(new DOMException("no longer wanted", "AbortError"));
    if (signal?.aborted) return stop();
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stopped);
      resolve();
    }, 1000 * seconds);
    const stopped = () => {
      clearTimeout(timer);
      stop();
    };
    signal?.addEventListener("abort", stopped, { once: true });
  });
}

// It is then unknown whether the request took effect.
export const isAway = (answer) => !answer?.status || [502, 503, 504].includes(answer.status);

// The delay that the server asks for, plus jitter, so that clients do not all retry at the same
// time.
function pauseOf(answer, usual) {
  const stated = Number(answer?.headers.get("Retry-After") ?? usual);
  const seconds = Number.isFinite(stated) && stated >= 0 ? stated : usual;
  return Math.min(seconds, LONGEST_PAUSE_SECONDS) + 0.3 * Math.random();
}

async function refusalOf(answer) {
  try {
    const { error } = await answer.json();
    return new Refused(answer.status, error.code, error.message);
  } catch {
    return new Refused(answer.status, "", `the server answers with status ${answer.status}`);
  }
}

const unreachable = () => new Refused(0, "unreachable", "the server cannot be reached");
