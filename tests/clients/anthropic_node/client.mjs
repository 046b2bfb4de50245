// The package `@anthropic-ai/sdk`: the Messages API.

import Anthropic from "@anthropic-ai/sdk"
import {
  assert, BIRD, CITY, DEMO, FOREVER, frees, KEY, LONG, Probe, QUESTION, raises, RECITER, run, WEATHER_ANSWER,
} from "./probe.mjs"

const probe = new Probe("anthropic (Node)", "@anthropic-ai/sdk")
const client = new Anthropic({ baseURL: DEMO, apiKey: KEY, maxRetries: 0 })
const stranger = new Anthropic({ baseURL: DEMO, apiKey: "wrong", maxRetries: 0 })
const endless = new Anthropic({ baseURL: RECITER, apiKey: KEY, maxRetries: 0 })
const common = { model: "demo", max_tokens: 100, messages: [{ role: "user", content: QUESTION }], temperature: 0 }
const goOn = { model: "reciter", max_tokens: 100_000, messages: [{ role: "user", content: FOREVER }] }
const inRome = { role: "user", content: "What is the weather in Rome?" }
const tools = [
  { name: "get_weather", description: "The weather of a city", input_schema: CITY },
  { name: "get_time", description: "The time in a city", input_schema: CITY },
]
const any = { type: "any", disable_parallel_tool_use: true }

function textOf(message) {
  return message.content.map((block) => (block.type === "text" ? block.text : "")).join("")
}

function called(message, name) {
  const use = message.content.find((block) => block.type === "tool_use")
  assert(use && message.stop_reason === "tool_use", message)
  assert(!name || use.name === name, use)
  assert(["Rome", "Oslo"].includes(use.input.city), use)
  return use
}

probe.tries("list models", async () => assert((await client.models.list()).data[0].id === "demo"))
probe.tries("create", async () => {
  const message = await client.messages.create(common)
  assert(textOf(message).includes("7") && message.stop_reason === "end_turn", message)
})
probe.tries("async", async () => assert((await client.messages.create(common)).type === "message"))
probe.tries("stream", async () => {
  assert((await client.messages.stream(common).finalText()).includes("7"))
})
probe.tries("usage in stream", async () => {
  assert((await client.messages.stream(common).finalMessage()).usage.output_tokens > 0)
})
probe.tries("stop", async () => {
  const message = await client.messages.create({ ...common, stop_sequences: ["7"] })
  assert(message.stop_reason === "stop_sequence" && message.stop_sequence === "7", message)
})
probe.tries("tools: auto", async () => {
  called(await client.messages.create({ ...common, messages: [inRome], tools }), "get_weather")
})
probe.tries("tools: required", async () => {
  called(await client.messages.create({ ...common, tools, tool_choice: any }))
  called(await client.messages.stream({ ...common, tools, tool_choice: any }).finalMessage())
})
probe.tries("tools: named", async () => {
  called(await client.messages.create({ ...common, tools, tool_choice: { type: "tool", name: "get_time" } }), "get_time")
})
probe.tries("tool messages", async () => {
  const asked = { ...common, messages: [inRome], tools: tools.slice(0, 1) }
  const forced = await client.messages.create({ ...asked, tool_choice: any })
  const result = { type: "tool_result", tool_use_id: called(forced).id, content: WEATHER_ANSWER }
  const turns = [inRome, { role: "assistant", content: forced.content }, { role: "user", content: [result] }]
  const text = textOf(await client.messages.create({ ...asked, messages: turns }))
  assert(text.includes("sunny"), text)
})
probe.tries("structured output", async () => {
  const config = { format: { type: "json_schema", schema: BIRD } }
  const bird = JSON.parse(textOf(await client.messages.create({ ...common, output_config: config })))
  assert(["robin", "owl"].includes(bird.name), bird)
})
probe.tries("reasoning", async () => {
  const asked = { ...common, model: "reciter", max_tokens: 2000 }
  const thinking = { type: "enabled", budget_tokens: 1024 }
  const [first, second] = (await endless.messages.stream({ ...asked, thinking }).finalMessage()).content
  assert(first.thinking === "I add 3 and 4." && second.text === "The answer is 7.", first)
  const { content } = await endless.messages.create({ ...asked, thinking: { type: "disabled" } })
  assert(content.length === 1 && content[0].text === "The answer is 7.", content)
})
probe.tries("count tokens", async () => {
  const { model, messages } = common
  const { input_tokens } = await client.messages.countTokens({ model, messages })
  const { usage } = await client.messages.create(common)
  assert(input_tokens === usage.input_tokens + usage.cache_read_input_tokens)
})
probe.tries("error: unknown model", () =>
  raises(
    () => client.messages.create({ ...common, model: "claude" }),
    (error) => error instanceof Anthropic.NotFoundError,
  ))
probe.tries("error: context overflow", () =>
  raises(
    () => client.messages.create({ ...common, messages: [{ role: "user", content: LONG }] }),
    (error) => error instanceof Anthropic.BadRequestError && error.message.includes("prompt is too long"),
  ))
probe.tries("error: bad key", () =>
  raises(() => stranger.messages.create(common), (error) => error instanceof Anthropic.AuthenticationError))
probe.tries("error: in a stream", () =>
  raises(
    async () => {
      const options = { headers: { "x-request-timeout": "1" } }
      for await (const _ of await endless.messages.create({ ...goOn, stream: true }, options));
    },
    (error) => error instanceof Anthropic.APIError && error.message.includes("deadline"),
  ))
probe.tries("cancel", () =>
  frees(RECITER, async () => {
    for await (const _ of await endless.messages.create({ ...goOn, stream: true })) break
  }))
probe.tries("timeout", () =>
  frees(RECITER, () =>
    raises(
      () => endless.messages.create(goOn, { timeout: 1000 }),
      (error) => error instanceof Anthropic.APIConnectionTimeoutError,
    )))
for (const name of ["logprobs", "n", "seed", "embeddings", "previous_response_id"]) {
  probe.absent(name, "Anthropic's API has none")
}

await run(probe)
