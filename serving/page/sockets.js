// WebSockets to the server that this page is from. They carry JSON, one object a message.
import { address } from "./api.js";

// What the last message of a socket said, or what the browser knows of its end.
export class Ended extends Error {}

// Opens at once; `hear` gets every message, and `end` an `Ended` when there will be no other.
export function connect(path, token, { hear, end }) {
  const url = address(path);
  url.protocol = url.protocol.replace("http", "ws");
  let socket;
  let reason = "";
  try {
    // A browser cannot set headers here: the token comes as a subprotocol.
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
