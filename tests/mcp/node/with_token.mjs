// Adds the server's token to every request of the conformance suite, which has no option for it.
import http from "node:http";
import { createRequire, syncBuiltinESMExports } from "node:module";

const { Agent, setGlobalDispatcher } = createRequire(process.env.CONFORMANCE_SUITE)("undici");
const bearer = `Bearer ${process.env.COATCHECK_MCP_TOKEN}`;

const withToken = (headers) => {
  if (!headers) return { authorization: bearer };
  if (Array.isArray(headers)) return [...headers, "authorization", bearer];
  if (typeof headers[Symbol.iterator] === "function") return [...headers].flat().concat("authorization", bearer);
  return { ...headers, authorization: bearer };
};

// Node's fetch and the suite's own undici both use the global dispatcher.
setGlobalDispatcher(
  new Agent().compose((dispatch) => (options, handler) =>
    dispatch({ ...options, headers: withToken(options.headers) }, handler)
  )
);

const request = http.request;
http.request = (...args) => {
  const outgoing = request(...args);
  outgoing.setHeader("authorization", bearer);
  return outgoing;
};
syncBuiltinESMExports();
