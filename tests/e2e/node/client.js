// Does what its first argument names, with @grpc/grpc-js, and prints one JSON value.
//
//   node client.js SCENARIO INFERENCE MANAGEMENT FOLDER
//
// INFERENCE and MANAGEMENT are addresses, FOLDER is the repository's root, where protos/ and examples/ are.
'use strict';

const fs = require('fs');
const path = require('path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [scenario, inferenceAddress, managementAddress, root] = process.argv.slice(2);
const GUARD_MS = 60000;

function load(file) {
  const options = { keepCase: true, includeDirs: [path.join(root, 'protos')] };
  return grpc.loadPackageDefinition(loader.loadSync(file, options));
}

function connect(Service, address) {
  return new Service(address, grpc.credentials.createInsecure(), { 'grpc.max_send_message_length': -1 });
}

const Inference = load('inference.proto').org.pytorch.serve.grpc.inference.InferenceAPIsService;
const Management = load('management.proto').org.pytorch.serve.grpc.management.ManagementAPIsService;
const Health = load('grpc/health/v1/health.proto').grpc.health.v1.Health;
const inference = connect(Inference, inferenceAddress);
const management = connect(Management, managementAddress);
const health = connect(Health, inferenceAddress);

// One unary call: {answer} or {code, details}.
function call(client, method, request, deadlineMs = GUARD_MS) {
  return new Promise((resolve) => {
    client[method](request, { deadline: Date.now() + deadlineMs }, (error, answer) => {
      resolve(error ? { code: error.code, details: error.details } : { answer });
    });
  });
}

// One stream: its pieces, and how it ended. It is cancelled after `cancelAfter` pieces.
function stream(request, cancelAfter = Infinity) {
  return new Promise((resolve) => {
    const pieces = [];
    const running = inference.StreamPredictions(request, { deadline: Date.now() + GUARD_MS });
    running.on('data', (answer) => {
      pieces.push(answer.prediction.toString());
      if (pieces.length === cancelAfter) running.cancel();
    });
    running.on('end', () => resolve({ pieces, code: grpc.status.OK }));
    running.on('error', (error) => resolve({ pieces, code: error.code }));
  });
}

function request(model, data, version = '') {
  return { model_name: model, model_version: version, input: { data: Buffer.from(data) } };
}

const image = (digit) => fs.readFileSync(path.join(root, 'examples/digits/samples', `${digit}.png`));

async function classify(digit, version) {
  const { answer, details } = await call(inference, 'Predictions', request('digits', image(digit), version));
  return answer ? JSON.parse(answer.prediction.toString()).class : details;
}

const scenarios = {
  async ping() {
    return JSON.parse((await call(inference, 'Ping', {})).answer.health);
  },
  async health() {
    const asked = ['', 'digits', 'nothing'].map((service) => call(health, 'Check', { service }));
    return (await Promise.all(asked)).map((one) => (one.answer ? one.answer.status : one.code));
  },
  async classify() {
    const asked = [];
    for (let round = 0; round < 5; round += 1) {
      for (let digit = 0; digit < 10; digit += 1) asked.push(classify(digit, ''));
    }
    return Promise.all(asked);
  },
  async stream() {
    return stream(request('hello_stream', 'x'));
  },
  async cancel() {
    const cancelled = await stream(request('text_stream', JSON.stringify({ prompt: 'I', max_tokens: 2000 })), 3);
    const after = await stream(request('text_stream', JSON.stringify({ prompt: 'Tyger Tyger', max_tokens: 5 })));
    return { cancelled: cancelled.code, after: after.pieces };
  },
  async deadline() {
    return call(inference, 'Predictions', request('text_stream', JSON.stringify({ max_tokens: 2000 })), 20);
  },
  async errors() {
    return Promise.all([
      call(inference, 'Predictions', request('nothing', 'x')),
      call(inference, 'Predictions', request('digits', 'x', '9.9')),
      call(inference, 'Predictions', request('digits', 'no image')),
      call(inference, 'Predictions', request('digits', Buffer.alloc(7000000))),
      call(management, 'RegisterModel', { url: 'digits.mar' }),
      call(management, 'DescribeModel', { model_name: 'nothing' }),
    ]);
  },
  async manage() {
    const said = [];
    const manage = async (method, fields) => {
      const { answer, details } = await call(management, method, fields);
      said.push(answer ? answer.msg.trim() : details);
    };
    await manage('RegisterModel', { url: 'digits_v2.mar', initial_workers: 1, synchronous: true });
    await manage('ScaleWorker', { model_name: 'digits', model_version: '2.0', min_worker: 2, synchronous: true });
    await manage('SetDefault', { model_name: 'digits', model_version: '2.0' });
    said.push(await classify(4, ''));
    await manage('UnregisterModel', { model_name: 'digits', model_version: '1.0' });
    const { answer } = await call(management, 'DescribeModel', { model_name: 'digits' });
    const [description] = JSON.parse(answer.msg);
    return { said, version: description.modelVersion, workers: description.workers.length };
  },
};

scenarios[scenario]()
  .then((result) => console.log(JSON.stringify(result)))
  .catch((error) => {
    console.error(error);
    process.exitCode = 1;
  })
  .finally(() => [inference, management, health].forEach((client) => client.close()));
