// Calls of the service: every call is a POST with a JSON body, and has the operator's token if there is one.

const KEY = "quire-token";

export class Refusal extends Error {
  /** An answer that is an error: `status` is that of HTTP. */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Returns the operator's token, which lives as long as this tab; empty: there is none. */
export function token() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setToken(text) {
  sessionStorage.setItem(KEY, text.trim());
}

/** Sends `body` and returns the response; throws a `Refusal` if it is an error. */
export async function send(path, body, signal) {
  const headers = { "content-type": "application/json" };
  if (token()) headers.authorization = `Bearer ${token()}`;
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw new Refusal(response.status, await problem(response));
  return response;
}

/** Sends `body` and returns the answer. */
export async function ask(path, body) {
  return (await send(path, body)).json();
}

/** Yields the server-sent events of a response until it ends; throws a `Refusal` for an event that is an error. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const data = part.slice(6);
      if (data === "[DONE]") return;
      const content = JSON.parse(data);
      if (content.error) throw new Refusal(content.error.code ?? 500, content.error.message);
      yield content;
    }
  }
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}
