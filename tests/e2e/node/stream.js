// Streams one answer from a Quire server with what npm offers, and prints what came as one JSON object.
//
//   node stream.js HOST:PORT FOLDER_OF_PROTOS '{"text": "…", "stop": {"maxTokens": 8}}'
"use strict"

const grpc = require("@grpc/grpc-js")
const protoLoader = require("@grpc/proto-loader")

const [target, folder, request] = process.argv.slice(2)
const definition = protoLoader.loadSync("quire/v1/generation.proto", {
  includeDirs: [folder],
  longs: String,
  enums: String,
  oneofs: true,
})
const { GenerationService } = grpc.loadPackageDefinition(definition).quire.v1
const client = new GenerationService(target, grpc.credentials.createInsecure())
const seen = { text: "", tokenIds: [], messages: 0, finished: null, error: null }

const stream = client.Generate(JSON.parse(request), { deadline: Date.now() + 60_000 })
stream.on("data", (response) => {
  seen.messages += 1
  if (response.event === "delta") {
    seen.text += response.delta.text
    seen.tokenIds.push(...response.delta.tokenIds)
  } else if (response.event === "finished") {
    seen.finished = response.finished
  }
})
stream.on("error", (error) => {
  seen.error = { code: grpc.status[error.code], details: error.details }
})
stream.on("close", () => {
  console.log(JSON.stringify(seen))
  client.close()
})
