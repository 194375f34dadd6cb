// WebSockets to the server that serves this page. Each message is one JSON object.
import { urlOf } from "./api.js";

// The socket was closed. The message is the server's reason, if it sent one.
export class ClosedError extends Error {}

// Connects immediately. Calls `onMessage` with every message and, at the end, `onClose` with a
// `ClosedError`.
export function connect(path, token, { onMessage, onClose }) {
  const url = urlOf(path);
  url.protocol = url.protocol.replace("http", "ws");
  let socket;
  let reason = "";
  try {
    // Browsers cannot set headers on a WebSocket, so the token is sent as a subprotocol.
    socket = new WebSocket(url, token === null ? [] : ["kway", `bearer.${token}`]);
  } catch (error) {
    if (error.name !== "SyntaxError") throw error;
    onClose(new ClosedError("browsers cannot send this token over a WebSocket: use a token that contains only letters and digits"));
    return null;
  }
  socket.addEventListener("message", ({ data }) => {
    const message = JSON.parse(data);
    if (message.error && message.frame === undefined) reason = message.error.message;
    else onMessage(message);
  });
  socket.addEventListener("close", () => onClose(new ClosedError(reason || "the connection was lost")));
  return socket;
}
