// The "Query" tab: images or texts, each with its verdicts.
import { Cards } from "./cards.js";
import { byId, bytes, count, element, nameOf } from "./elements.js";
import { chooser } from "./files.js";
import { VerdictLoader } from "./loader.js";
import { setScale, thresholdText, validationText } from "./verdict.js";

export class QueryPanel {
  #loader;
  #cards;
  #query = { classes: [], fields: {}, isComplete: true };
  #isDrawing = false;

  constructor(api, model) {
    this.reads = model.reads;
    this.#loader = new VerdictLoader(api, model.limits);
    this.#loader.addEventListener("change", () => this.#scheduleDraw());
    this.#cards = new Cards(byId("cards"), {
      remove: (input) => this.#loader.remove(input),
      retry: (input) => this.#loader.retry(input),
    });
    byId("clear").addEventListener("click", () => this.#clear());
    if (model.reads === "texts") this.#readTexts(model.limits);
    else this.#readImages(model.limits);
  }

  setQuery(query) {
    this.#query = query;
    this.#loader.setQuery(query.classes, query.isComplete ? query.fields : null);
  }

  addFiles(files) {
    if (this.reads === "images") this.#loader.add(files);
    else for (const { content } of files) content.text().then((text) => this.addText(text));
  }

  addText(text) {
    if (this.reads !== "texts") return;
    const lines = text.split(/\r\n|\r|\n/).filter((line) => line.trim());
    this.#loader.add(lines.map((content) => ({ name: content.slice(0, 60), content })));
  }

  #readImages(limits) {
    byId("images").hidden = false;
    byId("choose").append(chooser("choose files", (files) => this.#loader.add(files)));
    byId("images-limits").textContent =
      `JPEG, PNG, WebP, BMP or GIF, up to ${bytes(limits.max_body_bytes)} and ` +
      `${Math.floor(limits.max_pixels / 1e6)} megapixels each.`;
  }

  #readTexts(limits) {
    const [form, input] = [byId("texts"), byId("text-input")];
    form.hidden = false;
    byId("texts-limits").textContent = `Up to ${count(limits.max_text_chars, "character")} each.`;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.addText(input.value);
      input.value = "";
      input.focus();
    });
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
  }

  #clear() {
    this.#loader.clear();
    (this.reads === "texts" ? byId("text-input") : byId("choose").querySelector("button")).focus();
  }

  // Draw at most once per animation frame.
  #scheduleDraw() {
    if (this.#isDrawing) return;
    this.#isDrawing = true;
    requestAnimationFrame(() => {
      this.#isDrawing = false;
      this.#draw();
    });
  }

  #draw() {
    const { classes, fields, isComplete } = this.#query;
    const decides = Object.keys(fields).length > 0;
    const { inputs } = this.#loader;
    byId("results").hidden = inputs.length === 0;
    this.#cards.show(inputs, { decides, isLoading: isComplete });
    const done = inputs.flatMap((input) => (input.inputError || input.requestError || !input.verdicts ? [] : [input.verdicts]));
    const range = setScale(byId("cards"), done.flat());
    byId("legend").hidden = range === null;
    byId("legend-threshold").hidden = !decides;
    byId("axis").textContent = range?.map((end) => end.toFixed(1)).join(" to ");
    byId("thresholds").replaceChildren(...(classes.length && done.length ? done[0].map(thresholdLine) : []).filter(Boolean));
    const text = this.#summary(inputs, done, decides);
    if (byId("summary").textContent !== text) byId("summary").textContent = text;
  }

  #summary(inputs, done, decides) {
    const { classes } = this.#query;
    const parts = [];
    if (!classes.length && done.length) {
      parts.push(`The classes with the highest scores of ${count(done.length, this.reads.slice(0, -1))}`);
    } else if (decides && done.length) {
      for (const [index, { name }] of classes.entries()) {
        const yes = done.filter((one) => one[index].match).length;
        parts.push(`${classes.length > 1 ? `${name}: yes` : "Yes"} for ${yes} of ${done.length}`);
      }
    } else if (done.length) {
      parts.push(`${done.length} scored`);
    }
    const failed = inputs.filter((one) => one.inputError || one.requestError).length;
    if (failed) parts.push(`${failed} failed`);
    const pending = inputs.length - failed - done.length;
    if (pending) parts.push(`${pending} pending`);
    return parts.join(" · ");
  }
}

// How many validation samples the threshold of a class was set on, and how many of them reach it.
function thresholdLine({ class: name, decided }) {
  const text = decided ? validationText(decided) : "";
  return text ? element("li", {}, nameOf(name), `: ${thresholdText(decided, decided.threshold)}. ${text}`) : null;
}
