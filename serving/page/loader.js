// Stores the inputs and their verdicts. Fetches missing verdicts for several inputs per request and
// caches them, so selecting a class again sends no request.
import { bytes } from "./numbers.js";

// Fewer than the server accepts, so that the first verdicts arrive early.
const MAX_INPUTS_PER_REQUEST = 8;
const MAX_CONCURRENT_REQUESTS = 2;
// Generous estimate of the bytes that a form adds to each image.
const OVERHEAD_BYTES = 1000;
// Requested instead of classes if none are chosen: the classes with the largest scores.
const TOP = { id: "top" };
const NUM_TOP = 5;
// The start of an error message about one input of a request.
const INPUT_INDEX = /^(?:images|texts)\[(\d+)\](?:: | )(.*)$/s;

export class VerdictLoader extends EventTarget {
  #api;
  #limits;
  #classes = [];
  #fields = null;
  #abort = new AbortController();
  #numRequests = 0;

  inputs = [];

  constructor(api, limits) {
    super();
    this.#api = api;
    this.#limits = limits;
  }

  // Set the classes of the query. `fields` contains the fields of the decision, or is null if the
  // decision is incomplete.
  setQuery(classes, fields) {
    this.#classes = classes;
    this.#fields = fields;
    const previous = this.#abort;
    this.#abort = new AbortController();
    previous.abort();
    for (const input of this.inputs) input.requestError = null;
    this.#sendMissing();
  }

  // `content` is a File or a string. `inputError`: why it cannot be sent, or null.
  add(inputs) {
    for (const { name, content, inputError } of inputs) {
      const input = { name, content, inputError: inputError ?? this.#check(content), requestError: null };
      this.inputs.push(Object.assign(input, { verdicts: new Map(), isInFlight: false }));
    }
    this.#sendMissing();
  }

  remove(input) {
    this.inputs = this.inputs.filter((one) => one !== input);
    this.#changed();
  }

  clear() {
    this.inputs = [];
    this.setQuery(this.#classes, this.#fields);
  }

  retry(input) {
    input.requestError = null;
    this.#sendMissing();
  }

  // The verdicts in the order of the classes, or null while any of them is unknown. Without classes,
  // the verdicts on the classes with the largest scores.
  verdictsOf(input) {
    const verdicts = this.#wanted.flatMap(({ id }) => input.verdicts.get(this.#key(id)));
    return this.#fields && verdicts.every(Boolean) ? verdicts : null;
  }

  get #wanted() {
    return this.#classes.length ? this.#classes : [TOP];
  }

  // An error in the content that can be detected without the server, or null.
  #check(content) {
    if (typeof content === "string") {
      const [length, limit] = [[...content].length, this.#limits.max_text_chars];
      return length > limit ? `too long: ${length} characters, but the limit is ${limit}` : null;
    }
    const limit = this.#limits.max_body_bytes - OVERHEAD_BYTES;
    return content.size > limit ? `too large: ${bytes(content.size)}, but the limit is ${bytes(limit)}` : null;
  }

  #key(id) {
    return `${id} ${JSON.stringify(this.#fields)}`;
  }

  #missing(input) {
    if (!this.#fields || input.inputError || input.requestError || input.isInFlight) return [];
    return this.#wanted.filter(({ id }) => !input.verdicts.has(this.#key(id)));
  }

  #sendMissing() {
    this.#changed();
    while (this.#numRequests < MAX_CONCURRENT_REQUESTS) {
      const inputs = this.#nextBatch();
      if (!inputs.length) return;
      this.#send(inputs, this.#missing(inputs[0]));
    }
  }

  // The first inputs with the same missing classes, within the limits of one request.
  #nextBatch() {
    const batch = [];
    let [wanted, size] = ["", 0];
    const maxInputs = Math.min(MAX_INPUTS_PER_REQUEST, this.#limits.max_inputs);
    for (const input of this.inputs) {
      const missing = String(this.#missing(input).map(({ id }) => id));
      if (!missing || (batch.length && missing !== wanted)) continue;
      const added = OVERHEAD_BYTES + sizeOf(input.content);
      if (batch.length === maxInputs || (batch.length && size + added > this.#limits.max_body_bytes)) break;
      [wanted, size] = [missing, size + added];
      batch.push(input);
    }
    return batch;
  }

  async #send(inputs, classes) {
    const [fields, signal] = [this.#fields, this.#abort.signal];
    const keys = new Map(classes.map(({ id }) => [id, this.#key(id)]));
    this.#numRequests += 1;
    for (const input of inputs) input.isInFlight = true;
    const body = bodyOf(inputs, classes, fields);
    try {
      if (classes[0] === TOP) {
        const { results } = await this.#api.requestJson("POST", "v1/classify", { body, signal });
        for (const { input: index, classes: found } of results) {
          const verdicts = found.map((one) => ({ ...one, decided: { ...one, recall: fields.recall } }));
          inputs[index].verdicts.set(keys.get(TOP.id), verdicts);
        }
      } else {
        const { results, thresholds } = await this.#api.requestJson("POST", "v1/query", { body, signal });
        const decided = new Map(thresholds.map((one) => [one.class_id, one]));
        for (const { input: index, verdicts } of results) {
          for (const one of verdicts) {
            inputs[index].verdicts.set(keys.get(one.class_id), { ...one, decided: decided.get(one.class_id) });
          }
        }
      }
    } catch (error) {
      if (error.name !== "AbortError") await this.#setError(inputs, error);
    } finally {
      this.#numRequests -= 1;
      for (const input of inputs) input.isInFlight = false;
      this.#sendMissing();
    }
  }

  // Assign an error to the input that caused it or, if unknown, to all inputs of the request.
  async #setError(inputs, error) {
    const [, index, reason] = INPUT_INDEX.exec(error.message) ?? [];
    if (inputs[index]) {
      inputs[index].inputError = reason;
      return;
    }
    for (const input of inputs) {
      // The browser does not report which file it could not send.
      if (error.code === "unreachable" && !(await isReadable(input.content))) {
        input.inputError = "cannot be read: the file was changed or moved, or is a folder";
      } else {
        input.requestError = error.message;
      }
    }
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

// JSON needs up to six bytes per character.
const sizeOf = (content) => (typeof content === "string" ? 6 * content.length : content.size);

// Texts are sent as JSON, images as the files of a form.
function bodyOf(inputs, classes, fields) {
  const contents = inputs.map(({ content }) => content);
  const isTop = classes[0] === TOP;
  const sent = isTop ? { top: NUM_TOP, ...fields } : fields;
  if (typeof contents[0] === "string") {
    return { ...(isTop ? {} : { classes: classes.map(({ id }) => id) }), texts: contents, ...sent };
  }
  const form = new FormData();
  if (!isTop) for (const { id, name } of classes) form.append("classes", formValue(id, name));
  for (const [field, value] of Object.entries(sent)) form.append(field, value);
  for (const file of contents) form.append("images", file, "image");
  return form;
}

// The unique name, or the id if a form would change line breaks in the name.
const formValue = (id, name) => (/[\r\n]/.test(name) ? `#${id}` : name);

async function isReadable(content) {
  if (typeof content === "string") return true;
  try {
    await content.slice(0, 1).arrayBuffer();
    return true;
  } catch {
    return false;
  }
}
