// Files and texts that are dropped or pasted anywhere on the page.
import { element } from "./elements.js";

// `onInputs(files, text)` receives [{ name, content, inputError }] and the dropped or pasted text.
export function onDropped(onInputs) {
  const mark = (isDragging) => document.body.classList.toggle("dragging", isDragging);
  const receive = (event, data) => {
    if (document.querySelector("dialog[open]")) return;
    if (event.target.matches?.("input, textarea") && !data.files.length) return;
    event.preventDefault(); // otherwise the browser would open a dropped file instead of the page
    const entries = [...data.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
    const folders = new Set(entries.filter((one) => one.isDirectory).map((one) => one.name));
    const text = data.getData("text/plain");
    if (data.files.length || text.trim()) onInputs(inputsOf(data.files, folders), text);
  };
  document.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.some((one) => one === "Files" || one === "text/plain")) return;
    event.preventDefault();
    mark(true);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget === null && mark(false));
  document.addEventListener("drop", (event) => {
    mark(false);
    receive(event, event.dataTransfer);
  });
  document.addEventListener("paste", (event) => receive(event, event.clipboardData));
}

// Convert files to inputs. Folders are reported, not silently ignored.
function inputsOf(files, folders = new Set()) {
  return [...files].map((file) => ({
    name: file.name || "image",
    content: file,
    inputError: folders.has(file.name) ? "this is a folder: choose the images in it" : null,
  }));
}

// A button that opens the browser's file chooser.
export function chooser(label, onFiles) {
  const input = element("input", {
    type: "file", accept: "image/*", multiple: true, hidden: true,
    onchange: () => {
      onFiles(inputsOf(input.files));
      input.value = ""; // allow choosing the same file again
    },
  });
  const button = element("button", { type: "button", class: "button", onclick: () => input.click() }, label);
  return element("span", {}, button, input);
}
