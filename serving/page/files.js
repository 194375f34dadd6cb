// Files and texts dropped or pasted anywhere on the page, for the open tab.
import { element } from "./elements.js";

// `take` receives [{ name, content, fault }] for files, `takeText` a dropped or pasted text.
export function onDropped(take, takeText) {
  let depth = 0; // drag events also fire for each child element, so count them
  const mark = (change) => {
    depth = Math.max(0, depth + change);
    document.body.classList.toggle("dragging", depth > 0);
  };
  const isFull = ({ dataTransfer }) => [...(dataTransfer?.types ?? [])].some((one) => one === "Files" || one === "text/plain");
  document.addEventListener("dragenter", (event) => isFull(event) && mark(1));
  document.addEventListener("dragleave", (event) => isFull(event) && mark(-1));
  document.addEventListener("dragover", (event) => isFull(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    depth = 0;
    mark(0);
    if (isField(event.target) && !event.dataTransfer.files.length) return;
    event.preventDefault(); // otherwise the browser would open the file instead of the page
    receive(event.dataTransfer, take, takeText);
  });
  document.addEventListener("paste", (event) => {
    if (document.querySelector("dialog[open]")) return;
    if (isField(event.target) && !event.clipboardData.files.length) return;
    event.preventDefault();
    receive(event.clipboardData, take, takeText);
  });
}

// Convert files to inputs. Empty files and folders are reported, not silently ignored.
export function inputsOf(files, folders = new Set()) {
  return [...files].map((file) => ({
    name: file.name || "an image",
    content: file,
    fault: folders.has(file.name) ? "is a folder: choose the images in it" : null,
  }));
}

function receive(data, take, takeText) {
  const entries = [...data.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  const folders = new Set(entries.filter((one) => one.isDirectory).map((one) => one.name));
  if (data.files.length) take(inputsOf(data.files, folders));
  else if (data.getData("text/plain").trim()) takeText(data.getData("text/plain"));
}

const isField = (target) => target.matches?.("input, textarea");

// A button that opens the browser's file chooser.
export function chooser(label, take) {
  const input = element("input", {
    type: "file", accept: "image/*", multiple: true, hidden: true,
    onchange: () => {
      take(inputsOf(input.files));
      input.value = ""; // allow choosing the same file again
    },
  });
  const button = element("button", { type: "button", class: "button", onclick: () => input.click() }, label);
  return element("span", {}, button, input);
}
