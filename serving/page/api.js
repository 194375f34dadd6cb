// HTTP requests to the server that serves this page. Requests carry the token and are retried while
// the server is busy. Errors from the server are thrown as exceptions.
import { byId } from "./elements.js";

const MAX_DELAY_SECONDS = 60;
const MAX_ATTEMPTS = 4;
const VERSION_HEADER = "Kway-Model-Version";
const CHANGED = "The server has loaded another version of the model. Reload this page";

// A request that the server rejected. `code` is machine-readable; the message is meant for people.
export class RejectedError extends Error {
  constructor(status, code, message) {
    super(message);
    Object.assign(this, { status, code });
  }
}

export class Api {
  #version = null;

  constructor(tokens) {
    this.tokens = tokens;
  }

  // Send `body` as JSON, or as a form if it is FormData, and return the JSON of the response.
  async requestJson(method, path, { body, signal } = {}) {
    return (await this.request(method, path, { body, signal })).json();
  }

  async request(method, path, { body, signal } = {}) {
    for (let attempt = 1; ; ) {
      const token = this.tokens.current;
      const response = await this.#send(method, path, { body, signal, token });
      // The page must not mix the classes and verdicts of two versions of the model. Responses of
      // the proxy do not have the header.
      const version = response?.headers.get(VERSION_HEADER) ?? null;
      this.#version ??= version;
      if (version !== null && version !== this.#version) throw new RejectedError(409, "model_changed", CHANGED);
      if (response?.ok) return response;
      const error = response ? await errorOf(response) : new RejectedError(0, "unreachable", "the server cannot be reached");
      if (response?.status === 401) {
        await this.tokens.replace(token);
      } else if (response?.status === 429) {
        await this.#delay(retryDelay(response, 1), `The server is busy (${error.message})`, signal);
      } else if (isOutcomeUnknown(response) && attempt < MAX_ATTEMPTS) {
        await this.#delay(retryDelay(response, attempt), `No response (${error.message})`, signal);
        attempt += 1;
      } else {
        throw error;
      }
    }
  }

  // The response, or null if there was none. Rethrows an abort.
  async #send(method, path, { body, signal, token }) {
    const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
    const isForm = body instanceof FormData;
    if (body !== undefined && !isForm) headers["Content-Type"] = "application/json";
    const content = body === undefined || isForm ? body : JSON.stringify(body);
    try {
      return await fetch(new URL(path, document.baseURI), { method, headers, body: content, signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      return null;
    }
  }

  async #delay(seconds, reason, signal) {
    byId("waiting").textContent = `${reason}. Retrying in ${Math.ceil(seconds)} s.`;
    byId("waiting").hidden = false;
    await sleep(seconds, signal).finally(() => (byId("waiting").hidden = true));
  }
}

function sleep(seconds, signal) {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const timer = setTimeout(resolve, 1000 * seconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}

// Whether there was no response, or a proxy returned an error.
const isOutcomeUnknown = (response) => !response || [502, 503, 504].includes(response.status);

// The delay that the server requests, plus jitter, so that not all clients retry at the same time.
function retryDelay(response, fallback) {
  const header = Number(response?.headers.get("Retry-After") ?? NaN);
  const seconds = header >= 0 ? header : fallback;
  return Math.min(seconds, MAX_DELAY_SECONDS) + 0.3 * Math.random();
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new RejectedError(response.status, error.code, error.message);
  } catch {
    return new RejectedError(response.status, "", `the server responded with status ${response.status}`);
  }
}
