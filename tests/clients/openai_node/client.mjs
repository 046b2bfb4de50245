// The `openai` package of npm: Chat Completions and Responses.

import OpenAI from "openai"
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod"
import { z } from "zod"
import {
  assert, BIRD, CITY, DEMO, FOREVER, frees, KEY, LONG, Probe, QUESTION, raises, RECITER, run, WEATHER_ANSWER,
} from "./probe.mjs"

const chat = new Probe("openai (Node), Chat", "openai")
const responses = new Probe("openai (Node), Responses", "openai")
const client = new OpenAI({ baseURL: `${DEMO}/v1`, apiKey: KEY, maxRetries: 0 })
const stranger = new OpenAI({ baseURL: `${DEMO}/v1`, apiKey: "wrong", maxRetries: 0 })
const endless = new OpenAI({ baseURL: `${RECITER}/v1`, apiKey: KEY, maxRetries: 0 })
const common = { model: "demo", messages: [{ role: "user", content: QUESTION }], temperature: 0 }
const goOn = { model: "reciter", max_tokens: 100_000, messages: [{ role: "user", content: FOREVER }] }
const inRome = { role: "user", content: "What is the weather in Rome?" }
const functions = [
  { name: "get_weather", description: "The weather of a city", parameters: CITY },
  { name: "get_time", description: "The time in a city", parameters: CITY },
]
const tools = functions.map((each) => ({ type: "function", function: each }))
const flatTools = functions.map((each) => ({ type: "function", strict: true, ...each }))
const Bird = z.object({ name: z.enum(["robin", "owl"]), size: z.enum(["small", "large"]) })

function called(answer, name) {
  const call = answer.choices[0].message.tool_calls?.[0]
  assert(call, "no tool was called")
  assert(!name || call.function.name === name, call)
  assert(["Rome", "Oslo"].includes(JSON.parse(call.function.arguments).city), call)
  return call
}

async function collected(stream) {
  const chunks = []
  for await (const chunk of stream) chunks.push(chunk)
  return chunks
}

chat.tries("list models", async () => assert((await client.models.list()).data[0].id === "demo"))
chat.tries("create", async () => {
  const answer = await client.chat.completions.create(common)
  assert(answer.choices[0].message.content.includes("7") && answer.usage.total_tokens > 0, answer)
})
chat.tries("async", async () => assert((await client.chat.completions.create(common)).choices.length === 1))
chat.tries("stream", async () => {
  const chunks = await collected(await client.chat.completions.create({ ...common, stream: true }))
  assert(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("").includes("7"))
  assert((await client.chat.completions.stream(common).finalContent()).includes("7"))
})
chat.tries("usage in stream", async () => {
  const options = { ...common, stream: true, stream_options: { include_usage: true } }
  assert((await collected(await client.chat.completions.create(options))).at(-1).usage.completion_tokens > 0)
})
chat.tries("n", async () => {
  const answer = await client.chat.completions.create({ ...common, temperature: 1, n: 3, max_tokens: 5 })
  assert(answer.choices.length === 3)
})
chat.tries("stop", async () => {
  const { message } = (await client.chat.completions.create({ ...common, stop: ["7"] })).choices[0]
  assert(!message.content.includes("7"))
})
chat.tries("seed", async () => {
  const ask = () => client.completions.create({ model: "demo", prompt: "The old king", max_tokens: 8, seed: 5 })
  assert((await ask()).choices[0].text === (await ask()).choices[0].text)
})
chat.tries("logprobs", async () => {
  const answer = await client.chat.completions.create({ ...common, logprobs: true, top_logprobs: 2 })
  assert(answer.choices[0].logprobs.content.every((each) => each.top_logprobs.length === 2))
})
chat.tries("embeddings", async () => {
  const { data } = await client.embeddings.create({ model: "demo", input: ["a bird", "a king"] })
  assert(data.length === 2 && data[0].embedding.length > 0)
})
chat.tries("tools: auto", async () => {
  called(await client.chat.completions.create({ ...common, messages: [inRome], tools }), "get_weather")
})
chat.tries("tools: required", async () => {
  const forced = { ...common, tools, tool_choice: "required", parallel_tool_calls: false }
  called(await client.chat.completions.create(forced))
  called(await client.chat.completions.stream(forced).finalChatCompletion())
})
chat.tries("tools: named", async () => {
  const choice = { type: "function", function: { name: "get_time" } }
  called(await client.chat.completions.create({ ...common, tools, tool_choice: choice }), "get_time")
})
chat.tries("tool messages", async () => {
  const asked = { ...common, messages: [inRome], tools: tools.slice(0, 1) }
  const forced = await client.chat.completions.create({ ...asked, tool_choice: "required", parallel_tool_calls: false })
  const result = { role: "tool", tool_call_id: called(forced).id, content: WEATHER_ANSWER }
  const turns = [inRome, forced.choices[0].message, result]
  const { content } = (await client.chat.completions.create({ ...asked, messages: turns })).choices[0].message
  assert(content.includes("sunny"), content)
})
chat.tries("agent loop", async () => {
  const cities = []
  const runner = client.chat.completions.runTools({
    ...common,
    messages: [inRome],
    tools: [
      {
        type: "function",
        function: {
          ...functions[0],
          parse: JSON.parse,
          function: ({ city }) => {
            cities.push(city)
            return WEATHER_ANSWER
          },
        },
      },
    ],
  })
  const content = await runner.finalContent()
  assert(cities.join() === "Rome" && content.includes("sunny"), content)
})
chat.tries("structured output", async () => {
  const form = { type: "json_schema", json_schema: { name: "bird", schema: BIRD, strict: true } }
  const answer = await client.chat.completions.create({ ...common, response_format: form })
  assert(Bird.parse(JSON.parse(answer.choices[0].message.content)))
  const parsed = await client.chat.completions.parse({ ...common, response_format: zodResponseFormat(Bird, "bird") })
  assert(Bird.parse(parsed.choices[0].message.parsed))
})
chat.tries("reasoning", async () => {
  const { message } = (await endless.chat.completions.create({ ...common, model: "reciter" })).choices[0]
  assert(message.reasoning_content === "I add 3 and 4." && message.content === "The answer is 7.", message)
})
chat.tries("error: unknown model", () =>
  raises(
    () => client.chat.completions.create({ ...common, model: "gpt-4o" }),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
  ))
chat.tries("error: context overflow", () =>
  raises(
    () => client.chat.completions.create({ ...common, messages: [{ role: "user", content: LONG }] }),
    (error) => error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded",
  ))
chat.tries("error: bad key", () =>
  raises(() => stranger.chat.completions.create(common), (error) => error instanceof OpenAI.AuthenticationError))
const short = { headers: { "x-request-timeout": "1" } }
chat.tries("error: in a stream", () =>
  raises(
    async () => {
      for await (const _ of await endless.chat.completions.create({ ...goOn, stream: true }, short));
    },
    (error) => error instanceof OpenAI.APIError && error.message.includes("deadline"),
  ))
chat.tries("cancel", () =>
  frees(RECITER, async () => {
    for await (const _ of await endless.chat.completions.create({ ...goOn, stream: true })) break
  }))
chat.tries("timeout", () =>
  frees(RECITER, () =>
    raises(
      () => endless.chat.completions.create(goOn, { timeout: 1000 }),
      (error) => error instanceof OpenAI.APIConnectionTimeoutError,
    )))
chat.absent("previous_response_id", "part of Responses")
chat.absent("count tokens", "OpenAI's Chat API has none")

const asked = { model: "demo", input: QUESTION, temperature: 0 }

function callOf(response, name) {
  const call = response.output.find((item) => item.type === "function_call")
  assert(call, "no tool was called")
  assert(!name || call.name === name, call)
  assert(["Rome", "Oslo"].includes(JSON.parse(call.arguments).city), call)
  return call
}

responses.tries("list models", async () => assert((await client.models.retrieve("demo")).id === "demo"))
responses.tries("create", async () => {
  const response = await client.responses.create(asked)
  assert(response.output_text.includes("7") && response.status === "completed", response)
})
responses.tries("async", async () => assert((await client.responses.create(asked)).output.length === 1))
responses.tries("stream", async () => {
  const events = await collected(await client.responses.create({ ...asked, stream: true }))
  assert(events[0].type === "response.created" && events.at(-1).type === "response.completed")
  assert((await client.responses.stream(asked).finalResponse()).output_text.includes("7"))
})
responses.tries("usage in stream", async () => {
  const events = await collected(await client.responses.create({ ...asked, stream: true }))
  assert(events.at(-1).response.usage.output_tokens > 0)
})
responses.tries("logprobs", async () => {
  const include = ["message.output_text.logprobs"]
  const response = await client.responses.create({ ...asked, top_logprobs: 2, include })
  const found = response.output[0].content[0].logprobs
  assert(found.length > 0 && found.every((each) => each.top_logprobs.length === 2))
})
responses.tries("tools: auto", async () => {
  callOf(await client.responses.create({ ...asked, input: [inRome], tools: flatTools }), "get_weather")
})
responses.tries("tools: required", async () => {
  const forced = { ...asked, tools: flatTools, tool_choice: "required", parallel_tool_calls: false }
  callOf(await client.responses.create(forced))
  callOf(await client.responses.stream(forced).finalResponse())
})
responses.tries("tools: named", async () => {
  const choice = { type: "function", name: "get_time" }
  callOf(await client.responses.create({ ...asked, tools: flatTools, tool_choice: choice }), "get_time")
})
responses.tries("tool messages", async () => {
  const base = { ...asked, tools: flatTools.slice(0, 1) }
  const forced = await client.responses.create({
    ...base, input: [inRome], tool_choice: "required", parallel_tool_calls: false,
  })
  const result = { type: "function_call_output", call_id: callOf(forced).call_id, output: WEATHER_ANSWER }
  const answer = await client.responses.create({ ...base, input: [inRome, ...forced.output, result] })
  assert(answer.output_text.includes("sunny"), answer.output_text)
})
responses.tries("structured output", async () => {
  const form = { format: { type: "json_schema", name: "bird", schema: BIRD, strict: true } }
  assert(Bird.parse(JSON.parse((await client.responses.create({ ...asked, text: form })).output_text)))
  const parsed = await client.responses.parse({ ...asked, text: { format: zodTextFormat(Bird, "bird") } })
  assert(Bird.parse(parsed.output_parsed))
})
responses.tries("reasoning", async () => {
  const [reasoning, message] = (await endless.responses.create({ ...asked, model: "reciter" })).output
  assert(reasoning.content[0].text === "I add 3 and 4." && message.content[0].text === "The answer is 7.")
})
responses.tries("previous_response_id", async () => {
  const first = await client.responses.create(asked)
  const second = await client.responses.create({ ...asked, previous_response_id: first.id })
  assert(second.usage.input_tokens > first.usage.input_tokens)
  assert((await client.responses.retrieve(first.id)).output_text === first.output_text)
  await client.responses.delete(first.id)
})
responses.tries("count tokens", async () => {
  assert((await client.responses.inputTokens.count({ model: "demo", input: QUESTION })).input_tokens > 3)
})
responses.tries("error: unknown model", () =>
  raises(
    () => client.responses.create({ ...asked, model: "gpt-4o" }),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
  ))
responses.tries("error: context overflow", () =>
  raises(
    () => client.responses.create({ ...asked, input: LONG }),
    (error) => error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded",
  ))
responses.tries("error: bad key", () =>
  raises(() => stranger.responses.create(asked), (error) => error instanceof OpenAI.AuthenticationError))
responses.tries("error: in a stream", () =>
  raises(
    async () => {
      const request = { model: "reciter", input: FOREVER, max_output_tokens: 100_000, stream: true }
      for await (const _ of await endless.responses.create(request, short));
    },
    (error) => error instanceof OpenAI.APIError && error.message.includes("deadline"),
  ))
responses.tries("cancel", () =>
  frees(RECITER, async () => {
    const stream = await endless.responses.create({ model: "reciter", input: FOREVER, max_output_tokens: 100_000, stream: true })
    for await (const _ of stream) break
  }))
responses.tries("timeout", () =>
  frees(RECITER, () =>
    raises(
      () => endless.responses.create({ model: "reciter", input: FOREVER, max_output_tokens: 100_000 }, { timeout: 1000 }),
      (error) => error instanceof OpenAI.APIConnectionTimeoutError,
    )))
for (const name of ["n", "stop", "seed"]) responses.absent(name, "OpenAI's Responses API has none")
responses.absent("embeddings", "see Chat")

await run(chat, responses)
