// Asks the search of a built documentation site, with the site's own script: node search.js SITE QUESTION …
// Prints a JSON object: the locations found for each question, best first.
"use strict"

const fs = require("fs")
const path = require("path")
const vm = require("vm")

const [site, ...questions] = process.argv.slice(2)
const workers = path.join(site, "assets/javascripts/workers")
const script = fs.readdirSync(workers).find((name) => /^search\..*\.js$/.test(name))
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"))

const listeners = []
const answers = []
const scope = {
  addEventListener: (kind, listener) => kind === "message" && listeners.push(listener),
  postMessage: (message) => answers.push(message),
  console,
  setTimeout,
  clearTimeout,
}
scope.self = scope
scope.globalThis = scope
vm.runInNewContext(fs.readFileSync(path.join(workers, script), "utf8"), scope)

async function send(type, data) {
  const before = answers.length
  for (const listener of listeners) await listener({ data: { type, data } })
  if (answers.length === before) throw new Error(`no answer to a message of type ${type}`)
  return answers[answers.length - 1]
}

async function main() {
  await send(0, { config: index.config, docs: index.docs, options: { suggest: false } })
  const found = {}
  for (const question of questions) {
    const { data } = await send(2, question)
    found[question] = data.items.map((group) => group.map((one) => one.location))
  }
  process.stdout.write(JSON.stringify(found))
}

main().catch((error) => {
  console.error(error)
  process.exit(1)
})
