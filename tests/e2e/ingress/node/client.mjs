// Core cases against a stand-in server (../standin_server.py), with @grpc/grpc-js.
// Usage: PACKAGES=FOLDER node client.mjs PORT, where FOLDER has node_modules. Prints one line for each case; exits 1 at the first failure.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import process from "node:process";

const require = createRequire(`${process.env.PACKAGES}/`);
const grpc = require("@grpc/grpc-js");

const same = (bytes) => bytes;
const method = (name, requestStream, responseStream) => ({
  path: name.startsWith("/") ? name : `/test.Echo/${name}`,
  requestStream,
  responseStream,
  requestSerialize: same,
  requestDeserialize: same,
  responseSerialize: same,
  responseDeserialize: same,
});
const definition = {
  unary: method("Unary", false, false),
  size: method("Size", false, false),
  fail: method("Fail", false, false),
  metadata: method("Metadata", false, false),
  hang: method("Hang", false, false),
  stream: method("Stream", false, true),
  failStream: method("FailStream", false, true),
  hangStream: method("HangStream", false, true),
  bidi: method("Bidi", true, true),
  wait: method("/test.Probe/Wait", false, false),
  missing: method("/no.Such/Method", false, false),
};
const Client = grpc.makeGenericClientConstructor(definition, "test");
const open = (options = {}) =>
  new Client(`127.0.0.1:${process.argv[2]}`, grpc.credentials.createInsecure(), {
    "grpc.max_receive_message_length": -1,
    "grpc.max_send_message_length": -1,
    ...options,
  });
const client = open();
const bytes = (text) => Buffer.from(text);

const ask = (name, data, { metadata = new grpc.Metadata(), options = {}, via = client } = {}) =>
  new Promise((resolve) => {
    const result = {};
    const call = via[name](data, metadata, options, (error, answer) => Object.assign(result, { error, answer }));
    call.on("metadata", (initial) => Object.assign(result, { initial }));
    call.on("status", (status) => resolve({ ...result, status }));
  });
const collect = async (call) => {
  const messages = [];
  for await (const message of call) messages.push(message.toString());
  return messages;
};

const cases = {
  async unary() {
    const { answer, status } = await ask("unary", bytes("hello"));
    assert.equal(answer.toString(), "hello");
    assert.equal(status.code, grpc.status.OK);
  },
  async "unary without content, and a large one"() {
    assert.equal((await ask("unary", bytes(""))).answer.length, 0);
    const big = Buffer.alloc(3_000_000, 7);
    assert.ok((await ask("unary", big)).answer.equals(big));
  },
  async "server stream"() {
    assert.deepEqual(await collect(client.stream(bytes("[1, 3, 2]"))), ["0", "1", "2", "3", "4", "5"]);
  },
  async "bidirectional, in turns"() {
    const call = client.bidi();
    const answers = call[Symbol.asyncIterator]();
    for (const message of ["a", "b", "c"]) {
      call.write(bytes(message));
      for (let copy = 0; copy < 2; copy += 1) assert.equal((await answers.next()).value.toString(), message);
    }
    call.end();
    assert.ok((await answers.next()).done);
  },
  async "status with UTF-8 and trailing metadata"() {
    const message = "größer: 100 % 日本";
    const { error } = await ask("fail", bytes(JSON.stringify({ kind: "InvalidArgument", message })));
    assert.equal(error.code, grpc.status.INVALID_ARGUMENT);
    assert.equal(error.details, message);
    assert.deepEqual(error.metadata.get("x-trailing"), ["of a failure"]);
    assert.deepEqual([...error.metadata.get("grpc-status-details-bin")[0]], [8, 3]);
  },
  async "status after a message"() {
    const call = client.failStream(bytes(""));
    const messages = [];
    call.on("data", (message) => messages.push(message.toString()));
    const error = await new Promise((resolve) => call.on("error", resolve));
    assert.deepEqual(messages, ["before"]);
    assert.equal(error.code, grpc.status.INTERNAL);
  },
  async "metadata both ways"() {
    const metadata = new grpc.Metadata();
    metadata.set("x-text", "value");
    metadata.set("x-data-bin", Buffer.from([0, 255, 1]));
    const { answer, initial, status } = await ask("metadata", bytes(""), { metadata });
    const seen = Object.fromEntries(JSON.parse(answer).metadata);
    assert.equal(seen["x-text"], "value");
    assert.deepEqual(seen["x-data-bin"], [0, 255, 1]);
    assert.deepEqual(initial.get("x-initial"), ["first"]);
    assert.deepEqual([...status.metadata.get("x-trailing-bin")[0]], [0xfe, 0x2c, 1]);
  },
  async deadline() {
    const { error } = await ask("hang", bytes("node deadline"), { options: { deadline: Date.now() + 300 } });
    assert.equal(error.code, grpc.status.DEADLINE_EXCEEDED);
    await ask("wait", bytes("node deadline cancelled"));
  },
  async "cancelled stream"() {
    const call = client.hangStream(bytes("node cancel"));
    call.on("error", (error) => assert.equal(error.code, grpc.status.CANCELLED));
    await new Promise((resolve) => call.once("data", resolve));
    await ask("wait", bytes("node cancel started"));
    call.cancel();
    await ask("wait", bytes("node cancel cancelled"));
  },
  async "gzip both ways"() {
    const via = open({ "grpc.default_compression_algorithm": 2 });
    const data = Buffer.alloc(100_000, "compressible ");
    assert.ok((await ask("unary", data, { via })).answer.equals(data));
    via.close();
  },
  async "oversize is refused"() {
    const { error } = await ask("size", Buffer.alloc(6_553_501));
    assert.equal(error.code, grpc.status.RESOURCE_EXHAUSTED);
  },
  async "unknown method"() {
    const { error } = await ask("missing", bytes("x"));
    assert.equal(error.code, grpc.status.UNIMPLEMENTED);
    assert.equal(error.details, "Method /no.Such/Method is unimplemented");
  },
  async "many at once"() {
    const answers = await Promise.all(Array.from({ length: 500 }, (_, number) => ask("unary", bytes(`${number}`))));
    assert.ok(answers.every(({ answer }, number) => answer.toString() === `${number}`));
  },
};

for (const [name, run] of Object.entries(cases)) {
  await run();
  console.log(name);
}
client.close();
