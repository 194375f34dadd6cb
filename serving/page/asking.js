// Inputs and their verdicts: requests those that the query still lacks, several inputs per request,
// and caches them, so that a class that is selected again costs nothing.
import { bytes } from "./numbers.js";

// Fewer than the server accepts, so that the first answers arrive soon.
const INPUTS_A_REQUEST = 8;
const REQUESTS_AT_ONCE = 2;
// Generous estimate of the bytes that a form adds to each image.
const EXTRA_BYTES = 1000;
const PLACE = /^(?:images|texts)\[(\d+)\](?:: | )(.*)$/s;

export class Asking extends EventTarget {
  #api;
  #limits;
  #classes = [];
  #fields = null;
  #stop = new AbortController();
  #requests = 0;

  inputs = [];

  constructor(api, limits) {
    super();
    this.#api = api;
    this.#limits = limits;
  }

  // Set the classes of the query. `fields` are those of the decision; null: it is incomplete.
  ask(classes, fields) {
    this.#classes = classes;
    this.#fields = fields;
    const before = this.#stop;
    this.#stop = new AbortController();
    before.abort();
    for (const input of this.inputs) input.failure = null;
    this.#go();
  }

  // `content` is a File or a text.
  add(found) {
    for (const { name, content, fault } of found) {
      const input = { name, content, fault: fault ?? this.#fault(content), failure: null };
      this.inputs.push(Object.assign(input, { known: new Map(), isAsked: false }));
    }
    this.#go();
  }

  remove(input) {
    this.inputs = this.inputs.filter((one) => one !== input);
    this.#changed();
  }

  clear() {
    this.inputs = [];
    this.ask(this.#classes, this.#fields);
  }

  tryAgain(input) {
    input.failure = null;
    this.#go();
  }

  // In the order of the classes; null while any of them is unknown.
  verdictsOf(input) {
    const found = this.#classes.map(({ id }) => input.known.get(this.#key(id)));
    return found.length && this.#fields && found.every(Boolean) ? found : null;
  }

  // What is wrong with the content, as far as that can be checked without the server.
  #fault(content) {
    if (typeof content === "string") {
      const [length, most] = [[...content].length, this.#limits.max_text_chars];
      return length > most ? `has ${length} characters, and the server takes ${most}: shorten it` : null;
    }
    const most = this.#limits.max_body_bytes - EXTRA_BYTES;
    return content.size > most ? `has ${bytes(content.size)}, and the server takes ${bytes(most)}` : null;
  }

  #key(id) {
    return `${id} ${JSON.stringify(this.#fields)}`;
  }

  #missing(input) {
    if (!this.#fields || input.fault || input.failure || input.isAsked) return [];
    return this.#classes.filter(({ id }) => !input.known.has(this.#key(id)));
  }

  #go() {
    this.#changed();
    while (this.#requests < REQUESTS_AT_ONCE) {
      const inputs = this.#next();
      if (!inputs.length) return;
      this.#send(inputs, this.#missing(inputs[0]));
    }
  }

  // The first inputs that lack the same classes, within the limits of one request.
  #next() {
    const found = [];
    let [wanted, size] = ["", 0];
    const most = Math.min(INPUTS_A_REQUEST, this.#limits.max_inputs);
    for (const input of this.inputs) {
      const missing = String(this.#missing(input).map(({ id }) => id));
      if (!missing || (found.length && missing !== wanted)) continue;
      const added = EXTRA_BYTES + sizeOf(input.content);
      if (found.length === most || (found.length && size + added > this.#limits.max_body_bytes)) break;
      [wanted, size] = [missing, size + added];
      found.push(input);
    }
    return found;
  }

  async #send(inputs, classes) {
    const [fields, signal] = [this.#fields, this.#stop.signal];
    const keys = new Map(classes.map(({ id }) => [id, this.#key(id)]));
    this.#requests += 1;
    for (const input of inputs) input.isAsked = true;
    try {
      const body = bodyOf(inputs, classes, fields);
      const answer = await this.#api.ask("POST", "v1/query", { body, signal });
      const thresholds = new Map(answer.thresholds.map((one) => [one.class_id, one]));
      for (const { input: place, verdicts } of answer.results) {
        for (const one of verdicts) {
          const decided = thresholds.get(one.class_id);
          inputs[place].known.set(keys.get(one.class_id), { ...one, decided });
        }
      }
    } catch (error) {
      if (error.name !== "AbortError") await this.#blame(inputs, error);
    } finally {
      this.#requests -= 1;
      for (const input of inputs) input.isAsked = false;
      this.#go();
    }
  }

  // Report an error for the input that it is about, or for all inputs of the request.
  async #blame(inputs, error) {
    const [, place, reason] = PLACE.exec(error.message) ?? [];
    if (inputs[place]) {
      inputs[place].fault = reason;
      return;
    }
    for (const input of inputs) {
      // The browser does not tell which file it could not send.
      if (error.code === "unreachable" && !(await isReadable(input.content))) {
        input.fault = "cannot be read: it was changed, moved or is a folder";
      } else {
        input.failure = error.message;
      }
    }
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

// In JSON a text takes up to six bytes per character.
const sizeOf = (content) => (typeof content === "string" ? 6 * content.length : content.size);

// Texts as JSON, images as the files of a form.
function bodyOf(inputs, classes, fields) {
  const contents = inputs.map(({ content }) => content);
  if (typeof contents[0] === "string") {
    return { classes: classes.map(({ id }) => id), texts: contents, ...fields };
  }
  const form = new FormData();
  for (const { id, name } of classes) form.append("classes", sendable(id, name));
  for (const [field, value] of Object.entries(fields)) form.append(field, value);
  for (const file of contents) form.append("images", file, "image");
  return form;
}

// Send the unique name, or the id if a form would change line breaks in the name.
const sendable = (id, name) => (/[\r\n]/.test(name) ? `#${id}` : name);

async function isReadable(content) {
  if (typeof content === "string") return true;
  try {
    await content.slice(0, 1).arrayBuffer();
    return true;
  } catch {
    return false;
  }
}
