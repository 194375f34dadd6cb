// Swagger UI for this server's OpenAPI document. Sends this tab's token with every request.
import { Api } from "./api.js";
import { byId } from "./elements.js";
import { Tokens } from "./tokens.js";

const tokens = new Tokens();

try {
  const spec = await new Api(tokens).requestJson("GET", "openapi.json");
  spec.servers = [{ url: new URL(".", document.baseURI).href }];
  globalThis.SwaggerUIBundle({
    spec,
    domNode: byId("operations"),
    deepLinking: true,
    validatorUrl: null, // the default would contact another server
    requestInterceptor: (request) => {
      if (tokens.current !== null) request.headers.Authorization ??= `Bearer ${tokens.current}`;
      return request;
    },
  });
} catch (error) {
  byId("page-error").textContent = `Failed to load the API documentation: ${error.message}`;
  byId("page-error").hidden = false;
}
