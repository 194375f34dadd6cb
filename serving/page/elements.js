// Creates DOM elements. Text is always inserted as text nodes, so names from models and files are
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
export function nameOf(text, attributes = {}) {
  return element("bdi", attributes, text);
}

export const byId = (id) => document.getElementById(id);
