// The AI SDK: `@ai-sdk/openai` (its default is Responses), `@ai-sdk/openai-compatible`, `@ai-sdk/anthropic`.

import { createAnthropic } from "@ai-sdk/anthropic"
import { createOpenAI } from "@ai-sdk/openai"
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { APICallError, embed, generateText, Output, stepCountIs, streamText, tool } from "ai"
import { z } from "zod"
import {
  assert, DEMO, FOREVER, frees, KEY, LONG, Probe, QUESTION, raises, RECITER, run, WEATHER_ANSWER,
} from "./probe.mjs"

const openai = new Probe("AI SDK, default (Responses)", "ai", "@ai-sdk/openai")
const compatible = new Probe("AI SDK, openai-compatible", "ai", "@ai-sdk/openai-compatible")
const anthropic = new Probe("AI SDK, Anthropic", "ai", "@ai-sdk/anthropic")
const city = z.object({ city: z.enum(["Rome", "Oslo"]) })
const Bird = z.object({ name: z.enum(["robin", "owl"]), size: z.enum(["small", "large"]) })
const inRome = "What is the weather in Rome?"
let cities = []

const tools = {
  get_weather: tool({
    description: "The weather of a city",
    inputSchema: city,
    execute: async (input) => {
      cities.push(input.city)
      return WEATHER_ANSWER
    },
  }),
  get_time: tool({ description: "The time in a city", inputSchema: city, execute: async () => "noon" }),
}

const makeOpenAI = (model = "demo", { url = DEMO, key = KEY } = {}) =>
  createOpenAI({ baseURL: `${url}/v1`, apiKey: key })(model)
const makeCompatible = (model = "demo", { url = DEMO, key = KEY } = {}) =>
  createOpenAICompatible({
    name: "quire", baseURL: `${url}/v1`, apiKey: key, includeUsage: true, supportsStructuredOutputs: true,
  })(model)
const makeAnthropic = (model = "demo", { url = DEMO, key = KEY } = {}) =>
  createAnthropic({ baseURL: `${url}/v1`, apiKey: key })(model)

function tryAll(probe, make) {
  const common = () => ({ model: make(), temperature: 0, maxRetries: 0, maxOutputTokens: 200 })
  const goOn = () => ({
    model: make("reciter", { url: RECITER }), prompt: FOREVER, maxOutputTokens: 100_000, maxRetries: 0,
  })
  probe.tries("create", async () => {
    const { text, usage } = await generateText({ ...common(), prompt: QUESTION })
    assert(text.includes("7") && usage.outputTokens > 0, text)
  })
  probe.tries("async", async () => assert((await generateText({ ...common(), prompt: QUESTION })).text))
  probe.tries("stream", async () => {
    let text = ""
    for await (const part of streamText({ ...common(), prompt: QUESTION }).textStream) text += part
    assert(text.includes("7"), text)
  })
  probe.tries("usage in stream", async () => {
    const result = streamText({ ...common(), prompt: QUESTION })
    await result.consumeStream()
    assert((await result.usage).outputTokens > 0)
  })
  probe.tries("tools: auto", async () => {
    const { toolCalls } = await generateText({ ...common(), prompt: inRome, tools })
    assert(toolCalls[0]?.toolName === "get_weather" && toolCalls[0].input.city === "Rome", toolCalls)
  })
  probe.tries("tools: required", async () => {
    const { toolCalls } = await generateText({ ...common(), prompt: inRome, tools, toolChoice: "required" })
    assert(toolCalls.length > 0, "no tool was called")
  })
  probe.tries("tools: named", async () => {
    const toolChoice = { type: "tool", toolName: "get_time" }
    const { toolCalls } = await generateText({ ...common(), prompt: inRome, tools, toolChoice })
    assert(toolCalls[0]?.toolName === "get_time", toolCalls)
  })
  probe.tries("tool messages", async () => {
    const first = await generateText({
      ...common(), prompt: inRome, tools: { get_weather: tools.get_weather },
      toolChoice: { type: "tool", toolName: "get_weather" },
    })
    const messages = [{ role: "user", content: inRome }, ...first.response.messages]
    const { text } = await generateText({ ...common(), messages, tools: { get_weather: tools.get_weather } })
    assert(text.includes("sunny"), text)
  })
  probe.tries("agent loop", async () => {
    cities = []
    const { text, steps } = await generateText({ ...common(), prompt: inRome, tools, stopWhen: stepCountIs(4) })
    assert(cities.join() === "Rome" && steps.length === 2, cities)
    assert(text.includes("sunny"), text)
  })
  probe.tries("structured output", async () => {
    const { output } = await generateText({
      ...common(), prompt: "Describe a bird.", output: Output.object({ schema: Bird }),
    })
    assert(Bird.parse(output))
  })
  probe.tries("reasoning", async () => {
    const { text, reasoningText } = await generateText({
      ...common(), model: make("reciter", { url: RECITER }), prompt: QUESTION, maxOutputTokens: 4000,
      providerOptions: {
        openai: { reasoningSummary: "auto", forceReasoning: true },
        anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } },
      },
    })
    assert(reasoningText === "I add 3 and 4." && text === "The answer is 7.", { reasoningText, text })
  })
  probe.tries("error: unknown model", () =>
    raises(
      () => generateText({ ...common(), model: make("gpt-4o"), prompt: QUESTION }),
      (error) => APICallError.isInstance(error) && error.statusCode === 404,
    ))
  probe.tries("error: context overflow", () =>
    raises(
      () => generateText({ ...common(), prompt: LONG }),
      (error) => APICallError.isInstance(error) && error.message.includes("maximum context length"),
    ))
  probe.tries("error: bad key", () =>
    raises(
      () => generateText({ ...common(), model: make("demo", { key: "wrong" }), prompt: QUESTION }),
      (error) => APICallError.isInstance(error) && error.statusCode === 401,
    ))
  probe.tries("error: in a stream", async () => {
    const errors = []
    const result = streamText({
      ...goOn(), headers: { "x-request-timeout": "1" }, onError: ({ error }) => errors.push(error),
    })
    for await (const _ of result.textStream);
    assert(errors.length === 1 && JSON.stringify(errors[0].message ?? errors[0]).includes("deadline"), errors)
  })
  probe.tries("cancel", () =>
    frees(RECITER, async () => {
      const abort = new AbortController()
      const result = streamText({ ...goOn(), abortSignal: abort.signal })
      for await (const _ of result.textStream) {
        abort.abort()
        break
      }
    }))
  probe.tries("timeout", () =>
    frees(RECITER, () =>
      raises(
        () => generateText({ ...goOn(), abortSignal: AbortSignal.timeout(1000) }),
        (error) => error.name === "TimeoutError" || error.cause?.name === "TimeoutError" || error.name === "AbortError",
      )))
}

tryAll(openai, makeOpenAI)
tryAll(compatible, makeCompatible)
tryAll(anthropic, makeAnthropic)

for (const [probe, make] of [[compatible, makeCompatible], [anthropic, makeAnthropic]]) {
  probe.tries("stop", async () => {
    const { text } = await generateText({
      model: make(), prompt: QUESTION, temperature: 0, maxOutputTokens: 200, stopSequences: ["7"],
    })
    assert(!text.includes("7"), text)
  })
}
openai.absent("stop", "OpenAI's Responses API has none")
compatible.tries("seed", async () => {
  const ask = () =>
    generateText({ model: makeCompatible(), prompt: "Tell me a story.", temperature: 1, seed: 5, maxOutputTokens: 8 })
  assert((await ask()).text === (await ask()).text)
})
openai.tries("embeddings", async () => {
  const model = createOpenAI({ baseURL: `${DEMO}/v1`, apiKey: KEY }).embeddingModel("demo")
  assert((await embed({ model, value: "a bird" })).embedding.length > 0)
})
compatible.tries("embeddings", async () => {
  const model = createOpenAICompatible({ name: "quire", baseURL: `${DEMO}/v1`, apiKey: KEY }).embeddingModel("demo")
  assert((await embed({ model, value: "a bird" })).embedding.length > 0)
})
openai.tries("logprobs", async () => {
  const { providerMetadata } = await generateText({
    model: makeOpenAI(), prompt: QUESTION, temperature: 0, providerOptions: { openai: { logprobs: 2 } },
  })
  assert(providerMetadata.openai.logprobs[0].every((each) => each.top_logprobs.length === 2), providerMetadata)
})
openai.tries("previous_response_id", async () => {
  const first = await generateText({ model: makeOpenAI(), prompt: QUESTION })
  const { responseId } = first.providerMetadata.openai
  const second = await generateText({
    model: makeOpenAI(), prompt: QUESTION, providerOptions: { openai: { previousResponseId: responseId } },
  })
  assert(second.usage.inputTokens > first.usage.inputTokens)
})

await run(openai, compatible, anthropic)
