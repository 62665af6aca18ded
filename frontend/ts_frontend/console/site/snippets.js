// The playground's call as programs make it: curl and Python, at the inference address.

const TEXT_CHARS_MAX = 4000;

/** Quoted for a POSIX shell. */
const shell = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** A Python literal: what JSON writes of a text is one. */
const python = (text) => JSON.stringify(text);

/** The inference address as this page's reader reaches it. */
export function inferenceAddress(server) {
  const told = server.addresses?.http_inference;
  if (!told) return "http://localhost:8080";
  if (!told.startsWith("http")) return "http://localhost"; // a Unix socket
  const address = new URL(told);
  if (["0.0.0.0", "[::]"].includes(address.hostname)) address.hostname = location.hostname;
  return address.origin;
}

/** Options that every curl needs: the socket, and the key. */
const reached = (server) => [
  server.addresses?.http_inference?.startsWith("unix:") && `--unix-socket ${shell(server.addresses.http_inference.slice(5))}`,
  server.keys && `-H "Authorization: Bearer $TOKEN"`,
];

/** `{curl, python}` for a chat, with OpenAI's client. Clients can name a version that isn't the default one in the path. */
export function chatSnippets(model, body, server) {
  const place = model.default ? "" : `/predictions/${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}`;
  const base = `${inferenceAddress(server)}${place}/v1`;
  const curl = [
    `curl -N ${shell(`${base}/chat/completions`)}`,
    ...reached(server),
    `-H 'Content-Type: application/json'`,
    `--data-binary ${shell(JSON.stringify(body))}`,
  ].filter(Boolean).join(" \\\n  ");
  const { stream, messages, ...more } = body;
  const lines = [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${python(base)}, api_key=${server.keys ? `"…")  # the inference key` : `"none")`}`,
    "messages = [",
    ...messages.map((one) => `    {"role": ${python(one.role)}, "content": ${python(one.content)}},`),
    "]",
    `options = {${Object.entries(more).map(([name, value]) => `${python(name)}: ${python(value)}`).join(", ")}}`,
    "for piece in client.chat.completions.create(messages=messages, stream=True, **options):",
    "    if piece.choices:",
    '        print(piece.choices[0].delta.content or "", end="", flush=True)',
  ];
  return { curl, python: lines.join("\n") };
}

/** `{curl, python}` for a request of the playground; `request.file` is the name of a file that is sent. */
export function snippets(request, server) {
  const url = `${inferenceAddress(server)}${request.path}`;
  const short = request.file ? "" : request.body.slice(0, TEXT_CHARS_MAX);
  const curl = [
    `curl -N ${shell(url)}`,
    ...reached(server),
    `-H ${shell(`Content-Type: ${request.type}`)}`,
    request.file ? `--data-binary ${shell(`@${request.file}`)}` : `--data-binary ${shell(short)}`,
  ].filter(Boolean).join(" \\\n  ");
  const headers = [`"Content-Type": ${python(request.type)}`];
  if (server.keys) headers.push(`"Authorization": f"Bearer {token}"`);
  const lines = [
    "import requests",
    "",
    server.keys && 'token = "…"  # the inference key',
    request.file ? `data = open(${python(request.file)}, "rb")` : `data = ${python(short)}.encode()`,
    `headers = {${headers.join(", ")}}`,
    `with requests.post(${python(url)}, data=data, headers=headers, stream=True) as answer:`,
    "    answer.raise_for_status()",
    "    for piece in answer.iter_content(None):",
    "        print(piece.decode(), end=\"\", flush=True)",
  ];
  return { curl, python: lines.filter((line) => line !== false && line !== undefined).join("\n") };
}
