// Stores the inputs and their verdicts, and fetches missing verdicts for several inputs per request.
import { bytes } from "./elements.js";

// Fewer than the server accepts, so that the first verdicts arrive early.
const MAX_INPUTS_PER_REQUEST = 8;
const MAX_CONCURRENT_REQUESTS = 2;
// Generous estimate of the bytes that a form adds to each image.
const OVERHEAD_BYTES = 1000;
// Without classes, those with the largest scores are requested.
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

  // `verdicts` of an input are a list in the order of the classes, or null while they are unknown.
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
    this.#abort.abort();
    this.#abort = new AbortController();
    this.#numRequests = 0;
    for (const input of this.inputs) Object.assign(input, { verdicts: null, requestError: null, isInFlight: false });
    this.#sendMissing();
  }

  // `content` is a File or a string. `inputError`: why it cannot be sent, or null.
  add(inputs) {
    for (const { name, content, inputError } of inputs) {
      const input = { name, content, inputError: inputError ?? this.#check(content) };
      this.inputs.push({ ...input, verdicts: null, requestError: null, isInFlight: false });
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

  // An error in the content that can be detected without the server, or null.
  #check(content) {
    if (typeof content === "string") {
      const [length, limit] = [[...content].length, this.#limits.max_text_chars];
      return length > limit ? `too long: ${length} characters, but the limit is ${limit}` : null;
    }
    const limit = this.#limits.max_body_bytes - OVERHEAD_BYTES;
    return content.size > limit ? `too large: ${bytes(content.size)}, but the limit is ${bytes(limit)}` : null;
  }

  #sendMissing() {
    this.#changed();
    while (this.#fields && this.#numRequests < MAX_CONCURRENT_REQUESTS) {
      const inputs = this.#nextBatch();
      if (!inputs.length) return;
      this.#send(inputs);
    }
  }

  // The first inputs without verdicts, within the limits of one request.
  #nextBatch() {
    const [batch, maxInputs] = [[], Math.min(MAX_INPUTS_PER_REQUEST, this.#limits.max_inputs)];
    let size = 0;
    for (const input of this.inputs) {
      if (input.verdicts || input.inputError || input.requestError || input.isInFlight) continue;
      size += OVERHEAD_BYTES + sizeOf(input.content);
      if (batch.length === maxInputs || (batch.length && size > this.#limits.max_body_bytes)) break;
      batch.push(input);
    }
    return batch;
  }

  async #send(inputs) {
    const [classes, fields, signal] = [this.#classes, this.#fields, this.#abort.signal];
    const [path, sent] = classes.length ? ["v1/query", fields] : ["v1/classify", { top: NUM_TOP, ...fields }];
    this.#numRequests += 1;
    for (const input of inputs) input.isInFlight = true;
    try {
      const body = bodyOf(inputs.map(({ content }) => content), classes, sent);
      const { results, thresholds = [] } = await this.#api.requestJson("POST", path, { body, signal });
      const decided = new Map(thresholds.map((one) => [one.class_id, one]));
      for (const { input: index, verdicts, classes: top } of results) {
        inputs[index].verdicts = verdicts
          ? verdicts.map((one) => ({ ...one, decided: decided.get(one.class_id) }))
          : top.map((one) => ({ ...one, decided: { ...one, recall: fields.recall } }));
      }
    } catch (error) {
      if (!signal.aborted) this.#setError(inputs, error);
    }
    if (signal.aborted) return; // the query has changed
    this.#numRequests -= 1;
    for (const input of inputs) input.isInFlight = false;
    this.#sendMissing();
  }

  // Assign an error to the input that caused it or, if unknown, to all inputs of the request.
  #setError(inputs, error) {
    const [, index, reason] = INPUT_INDEX.exec(error.message) ?? [];
    if (inputs[index]) inputs[index].inputError = reason;
    else for (const input of inputs) input.requestError = error.message;
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

// JSON needs up to six bytes per character.
const sizeOf = (content) => (typeof content === "string" ? 6 * content.length : content.size);

// Texts are sent as JSON, images as the files of a form.
function bodyOf(contents, classes, fields) {
  if (typeof contents[0] === "string") {
    return { ...(classes.length && { classes: classes.map(({ id }) => id) }), texts: contents, ...fields };
  }
  const form = new FormData();
  // The unique name, or the id if a form would change line breaks in the name.
  for (const { id, name } of classes) form.append("classes", /[\r\n]/.test(name) ? `#${id}` : name);
  for (const [field, value] of Object.entries(fields)) form.append(field, value);
  for (const file of contents) form.append("images", file, "image");
  return form;
}
