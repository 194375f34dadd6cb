// The results as a list of cards: the image or text, followed by one line per class.
import { element, nameOf } from "./elements.js";
import { kindOf, verdictRow } from "./verdict.js";

export class Cards {
  #list;
  #cards = new Map();
  #actions;

  // `actions`: the handlers `remove` and `retry`, which receive the input.
  constructor(list, actions) {
    this.#list = list;
    this.#actions = actions;
  }

  // Redraws only what has changed.
  show(inputs, { decides, isLoading }) {
    for (const [input, card] of this.#cards) if (!inputs.includes(input)) this.#drop(input, card);
    for (const input of inputs) {
      if (!this.#cards.has(input)) this.#cards.set(input, this.#card(input));
      const card = this.#cards.get(input);
      const { verdicts } = input;
      const state = JSON.stringify([input.inputError, input.requestError, verdicts, decides, isLoading]);
      if (state === card.state) continue;
      card.state = state;
      const kind = overall(input, verdicts);
      card.element.className = `card ${kind}`;
      card.element.setAttribute("aria-busy", String(kind === "pending" && isLoading));
      // Keep showing the old verdicts, dimmed, until new ones arrive, so that the layout does not
      // jump.
      if (kind === "pending" && isLoading && card.body.querySelector(".verdict")) continue;
      card.body.replaceChildren(this.#content(input, verdicts, { decides, isLoading }));
    }
  }

  #card(input) {
    const isText = typeof input.content === "string";
    const url = isText || input.inputError ? null : URL.createObjectURL(input.content);
    const remove = element("button", {
      type: "button", class: "remove", "aria-label": `Remove ${input.name}`,
      onclick: () => this.#remove(input),
    }, "×");
    const preview = isText
      ? element("p", { class: "text", dir: "auto" }, input.content)
      : thumbnail(url);
    const body = element("div", { class: "result" });
    const title = isText ? null : element("p", { class: "file" }, nameOf(input.name, { title: input.name }));
    const made = element("li", {}, preview, element("div", { class: "about" }, title, body), remove);
    this.#list.append(made);
    return { element: made, body, remove, url, state: "" };
  }

  #content(input, verdicts, { decides, isLoading }) {
    if (input.inputError) return problem(input.inputError);
    if (input.requestError) {
      const retry = { type: "button", class: "plain", onclick: () => this.#actions.retry(input) };
      return problem(input.requestError, element("button", retry, "Try again"));
    }
    if (verdicts) return element("ul", { class: "verdicts" }, ...verdicts.map((one) => verdictRow(one, decides)));
    return element("p", { class: "quiet small" }, isLoading ? "Loading…" : "Enter a score threshold above.");
  }

  // Move focus to the next card's button, so that keyboard users stay in the list.
  #remove(input) {
    const { element: card } = this.#cards.get(input);
    const next = card.nextElementSibling ?? card.previousElementSibling;
    this.#actions.remove(input);
    next?.querySelector(".remove").focus();
  }

  #drop(input, card) {
    if (card.url) URL.revokeObjectURL(card.url);
    card.element.remove();
    this.#cards.delete(input);
  }
}

function problem(message, ...more) {
  const sign = element("span", { class: "badge error-badge" }, element("span", { "aria-hidden": "true" }, "!"), " Failed");
  return element("p", { class: "problem" }, sign, " ", element("span", {}, message), " ", ...more);
}

function thumbnail(url) {
  const frame = element("span", { class: "thumbnail" });
  if (url === null) return frame;
  // No alt text: the file name is shown next to the image. The server may accept files that the
  // browser cannot display.
  const image = element("img", { src: url, alt: "", loading: "lazy", decoding: "async" });
  image.addEventListener("error", () => image.remove());
  frame.append(image);
  return frame;
}

function overall(input, verdicts) {
  if (input.inputError || input.requestError) return "wrong";
  if (!verdicts) return "pending";
  return verdicts.some((one) => kindOf(one) === "yes") ? "yes" : "no";
}
