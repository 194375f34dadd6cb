// Creates elements from their parts. Text is always set as text: names from models or files are
// never parsed as HTML.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// A name of unknown language and text direction.
export function nameOf(text, attributes = {}) {
  return element("bdi", attributes, text);
}

export const byId = (id) => document.getElementById(id);
