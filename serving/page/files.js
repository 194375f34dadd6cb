// Files and texts that are dropped or pasted anywhere on the page.
import { element } from "./elements.js";

// `onFiles` receives [{ name, content, inputError }]. `onText` receives dropped or pasted text.
export function onDropped(onFiles, onText) {
  let depth = 0; // drag events also fire for each child element, so count them
  const mark = (change) => {
    depth = Math.max(0, depth + change);
    document.body.classList.toggle("dragging", depth > 0);
  };
  const hasContent = ({ dataTransfer }) => [...(dataTransfer?.types ?? [])].some((one) => one === "Files" || one === "text/plain");
  document.addEventListener("dragenter", (event) => hasContent(event) && mark(1));
  document.addEventListener("dragleave", (event) => hasContent(event) && mark(-1));
  document.addEventListener("dragover", (event) => hasContent(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    depth = 0;
    mark(0);
    if (isField(event.target) && !event.dataTransfer.files.length) return;
    event.preventDefault(); // otherwise the browser would open the file instead of the page
    receive(event.dataTransfer, onFiles, onText);
  });
  document.addEventListener("paste", (event) => {
    if (document.querySelector("dialog[open]")) return;
    if (isField(event.target) && !event.clipboardData.files.length) return;
    event.preventDefault();
    receive(event.clipboardData, onFiles, onText);
  });
}

// Convert files to inputs. Folders are reported, not silently ignored.
function inputsOf(files, folders = new Set()) {
  return [...files].map((file) => ({
    name: file.name || "image",
    content: file,
    inputError: folders.has(file.name) ? "this is a folder: choose the images in it" : null,
  }));
}

function receive(data, onFiles, onText) {
  const entries = [...data.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  const folders = new Set(entries.filter((one) => one.isDirectory).map((one) => one.name));
  if (data.files.length) onFiles(inputsOf(data.files, folders));
  else if (data.getData("text/plain").trim()) onText(data.getData("text/plain"));
}

const isField = (target) => target.matches?.("input, textarea");

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
