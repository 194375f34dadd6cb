// WebSockets to the server of this page. Each message is one JSON object.
import { address } from "./api.js";

// The reason in the last message of a socket, or what the browser knows about its end.
export class Ended extends Error {}

// Connects immediately. Calls `hear` with every message, and `end` with an `Ended` after the last
// one.
export function connect(path, token, { hear, end }) {
  const url = address(path);
  url.protocol = url.protocol.replace("http", "ws");
  let socket;
  let reason = "";
  try {
    // Browsers cannot set headers on a WebSocket, so the token is sent as a subprotocol.
    socket = new WebSocket(url, token === null ? [] : ["kway", `bearer.${token}`]);
  } catch (error) {
    if (error.name !== "SyntaxError") throw error;
    end(new Ended("the token has signs that a browser cannot send here: ask for one of letters and digits"));
    return null;
  }
  socket.addEventListener("message", ({ data }) => {
    const said = JSON.parse(data);
    if (said.error && said.frame === undefined) reason = said.error.message;
    else hear(said);
  });
  socket.addEventListener("close", () => end(new Ended(reason || "the connection is lost")));
  return socket;
}
