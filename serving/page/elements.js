// Creates DOM elements, and formats the numbers in them. Text is always inserted as text nodes, so names from models and files are
// never parsed as HTML.

export function element(tag, attributes = {}, ...children) {
  const created = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) created.addEventListener(name.slice(2), value);
    else created.setAttribute(name, value === true ? "" : String(value));
  }
  created.append(...children.filter((child) => child !== null && child !== undefined));
  return created;
}

// A name, isolated from the text around it because its writing direction is unknown.
export const nameOf = (text, attributes = {}) => element("bdi", attributes, text);

export const byId = (id) => document.getElementById(id);

// Decimals use a point, as in the API and the CLI.
export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

// Format both with enough digits to tell them apart: 1.4996 is not shown as 1.50 next to 1.50.
export function formatPair(score, threshold) {
  for (let digits = 2; digits < 7; digits += 1) {
    const shown = [score.toFixed(digits), threshold.toFixed(digits)];
    if (shown[0] !== shown[1] || score === threshold) return shown;
  }
  return [String(score), String(threshold)];
}

export const percent = (fraction) => `${Number((100 * fraction).toPrecision(6))}%`;

export function bytes(number) {
  return number < 2 ** 20 ? `${Math.ceil(number / 1024)} KiB` : `${(number / 2 ** 20).toFixed(1)} MiB`;
}
