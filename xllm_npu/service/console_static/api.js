// The server's routes, with the API key that this tab knows. Paths are relative to the page's base.

const KEY = "xllm-npu.key";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

export class ApiFailure extends Error {
  constructor(status, message, retryAfter = "") {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  let reply;
  try {
    reply = await fetch(path, { ...options, headers, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure(0, "The server does not answer.");
  }
  if (reply.ok) return reply;
  let message = `The server answered ${reply.status}.`;
  try {
    message = (await reply.json()).error.message || message;
  } catch {
    // a proxy's page, not ours
  }
  throw new ApiFailure(reply.status, message, reply.headers.get("Retry-After") || "");
}

export const getState = async (signal) => (await call("console/state", { signal })).json();
export const getModels = async () => (await (await call("v1/models")).json()).data;

// Chunks of a chat completion, as they come. Aborting `signal` ends the request in the engine too.
export async function* streamChat(body, signal) {
  const reply = await call("v1/chat/completions", {
    method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal,
  });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const frames = rest.split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue;
      const data = frame.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiFailure(500, chunk.error.message);
      yield chunk;
    }
  }
}
