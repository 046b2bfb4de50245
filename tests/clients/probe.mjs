// What the programs of all Node clients share: try features one by one and write a JSON line for each.
// It is probe.py in JavaScript.

import { readFileSync } from "node:fs"

export const DEMO = process.env.CLIENTS_DEMO
export const RECITER = process.env.CLIENTS_RECITER
export const GRPC = process.env.CLIENTS_GRPC
export const KEY = process.env.CLIENTS_KEY
export const QUESTION = "What is 3 + 4?"
export const FOREVER = "Go on forever."
export const LONG = "word ".repeat(6000)
export const WEATHER_ANSWER = "sunny, 21 degrees"
export const CITY = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
}
export const BIRD = {
  type: "object",
  properties: { name: { enum: ["robin", "owl"] }, size: { enum: ["small", "large"] } },
  required: ["name", "size"],
  additionalProperties: false,
}
const FEATURE_MS = 180_000

export class Probe {
  #client
  #version
  #trials = new Map()

  constructor(client, ...packages) {
    this.#client = client
    this.#version = packages.map((name) => `${name} ${versionOf(name)}`).join(", ")
  }

  tries(feature, trial) {
    this.#trials.set(feature, trial)
  }

  absent(feature, reason) {
    this.#write(feature, "absent", reason)
  }

  async run(wanted) {
    for (const [feature, trial] of this.#trials) {
      if (wanted.length && !wanted.includes(feature)) continue
      let reason = ""
      try {
        await Promise.race([trial(), failAfter(FEATURE_MS)])
      } catch (error) {
        console.error(feature, error)
        reason = `${error.name}: ${error.message}`.slice(0, 500)
      }
      this.#write(feature, reason ? "fail" : "pass", reason)
    }
  }

  #write(feature, result, reason) {
    console.log(JSON.stringify({ client: this.#client, version: this.#version, feature, result, reason }))
  }
}

export async function run(...probes) {
  for (const probe of probes) await probe.run(process.argv.slice(2))
  process.exit(0)
}

export function assert(condition, message = "not as promised") {
  if (!condition) throw new Error(typeof message === "string" ? message : JSON.stringify(message))
}

// Expect the client's own exception; `check` looks at it.
export async function raises(action, check) {
  let raised
  try {
    await action()
  } catch (error) {
    raised = error
  }
  assert(raised !== undefined, "no error was raised")
  if (!check(raised)) {
    console.error(raised)
    throw new Error(`another error: ${raised.name}: ${raised.message}`)
  }
}

// Expect that the service ends a request as cancelled, and that none is left.
export async function frees(url, action) {
  const before = await metric(url, "quire_requests_ended_total", 'reason="cancelled"')
  await action()
  for (const end = Date.now() + FEATURE_MS; ; ) {
    const cancelled = (await metric(url, "quire_requests_ended_total", 'reason="cancelled"')) - before
    const live = (await metric(url, "vllm:num_requests_running")) + (await metric(url, "vllm:num_requests_waiting"))
    if (cancelled >= 1 && !live) return
    assert(Date.now() < end, `${cancelled} requests were cancelled, and ${live} are live`)
    await sleep(100)
  }
}

export function sleep(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms))
}

async function failAfter(ms) {
  await new Promise((resolve) => setTimeout(resolve, ms).unref())
  throw new Error(`no result within ${ms / 1000} s`)
}

async function metric(url, name, label = "") {
  const text = await (await fetch(`${url}/metrics`)).text()
  let sum = 0
  for (const [, labels, value] of text.matchAll(new RegExp(`^${name}(?:{(.*)})? (\\S+)$`, "gm"))) {
    if ((labels ?? "").includes(label)) sum += Number(value)
  }
  return sum
}

function versionOf(name) {
  return JSON.parse(readFileSync(new URL(`./node_modules/${name}/package.json`, import.meta.url))).version
}
