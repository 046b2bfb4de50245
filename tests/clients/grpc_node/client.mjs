// gRPC in Node by reflection: no stubs are generated, and no proto file is read.

import grpc from "@grpc/grpc-js"
import reflection from "grpc-js-reflection-client"
import { assert, DEMO, frees, GRPC, KEY, LONG, Probe, QUESTION, raises, run } from "./probe.mjs"

const probe = new Probe("gRPC by reflection (Node)", "@grpc/grpc-js", "grpc-js-reflection-client")
const credentials = grpc.credentials.createInsecure()
const reflected = new reflection.GrpcReflection(GRPC, credentials)
const asked = { chat: { messages: [{ role: "user", content: QUESTION }] }, sampling: { temperature: 0 } }
const endless = { text: "And then", stop: { max_tokens: 2000, ignore_eos: true } }

async function clientOf(service) {
  const descriptor = await reflected.getDescriptorBySymbol(`quire.v1.${service}`)
  const { quire } = descriptor.getPackageObject({ longs: String, enums: String, oneofs: true })
  return new quire.v1[service](GRPC, credentials)
}

const generation = await clientOf("GenerationService")
const models = await clientOf("ModelService")

function metadata(key = KEY) {
  const found = new grpc.Metadata()
  found.set("authorization", `Bearer ${key}`)
  return found
}

function call(client, method, request, { key, timeout = 60_000 } = {}) {
  return new Promise((resolve, reject) => {
    const done = (error, answer) => (error ? reject(error) : resolve(answer))
    client[method](request, metadata(key), { deadline: Date.now() + timeout }, done)
  })
}

const once = (request, options) => call(generation, "GenerateOnce", { request }, options)

function stream(request) {
  return generation.Generate(request, metadata(), { deadline: Date.now() + 60_000 })
}

async function collected(request) {
  const messages = []
  for await (const message of stream(request)) messages.push(message)
  return messages
}

probe.tries("list models", async () => {
  assert((await call(models, "ListModels", {})).models[0].name === "demo")
})
probe.tries("create", async () => assert((await once(asked)).choices[0].text.includes("7")))
probe.tries("async", async () => assert((await once(asked)).choices.length === 1))
probe.tries("stream", async () => {
  const text = (await collected(asked)).map((message) => message.delta?.text ?? "").join("")
  assert(text.includes("7"), text)
})
probe.tries("usage in stream", async () => {
  assert((await collected(asked)).at(-1).finished.usage.completion_tokens > 0)
})
probe.tries("n", async () => {
  const answer = await once({ text: "The sun", sampling: { n: 3 }, stop: { max_tokens: 4 } })
  assert(answer.choices.length === 3)
})
probe.tries("stop", async () => {
  assert(!(await once({ ...asked, stop: { stop_strings: ["7"] } })).choices[0].text.includes("7"))
})
probe.tries("seed", async () => {
  const request = { text: "The old king", sampling: { seed: 5, temperature: 1 }, stop: { max_tokens: 8 } }
  assert((await once(request)).choices[0].text === (await once(request)).choices[0].text)
})
probe.tries("logprobs", async () => {
  const found = (await collected({ ...asked, output: { logprobs: 2 } })).flatMap((each) => each.delta?.logprobs ?? [])
  assert(found.length > 0 && found.every((each) => each.top.length === 2))
})
probe.tries("structured output", async () => {
  const { text } = (await once({ ...asked, grammar: { regex: "[0-9]{3}" } })).choices[0]
  assert(/^[0-9]{3}$/.test(text), text)
})
probe.tries("embeddings", async () => {
  const answer = await call(generation, "Embed", { inputs: [{ text: "a bird" }, { text: "a king" }] })
  assert(answer.embeddings.length === 2)
})
probe.tries("count tokens", async () => {
  assert((await call(generation, "Tokenize", { chat: asked.chat })).token_ids.length > 3)
})
probe.tries("error: unknown model", () =>
  raises(() => once({ ...asked, model: "gpt-4o" }), (error) => error.code === grpc.status.NOT_FOUND))
probe.tries("error: context overflow", () =>
  raises(() => once({ text: LONG }), (error) => error.details.includes("maximum context length")))
probe.tries("error: bad key", () =>
  raises(() => once(asked, { key: "wrong" }), (error) => error.code === grpc.status.UNAUTHENTICATED))
probe.tries("cancel", () =>
  frees(DEMO, async () => {
    const running = stream(endless)
    running.on("error", () => {})
    await new Promise((resolve) => running.once("data", resolve))
    running.cancel()
  }))
probe.tries("timeout", () =>
  raises(() => once(endless, { timeout: 200 }), (error) => error.code === grpc.status.DEADLINE_EXCEEDED))
for (const name of ["tools: required", "tools: named"]) {
  probe.absent(name, "quire.v1 takes tools for the chat template; a call is forced with a grammar")
}
probe.absent("previous_response_id", "quire.v1 has Resume instead")

await run(probe)
