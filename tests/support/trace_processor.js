// Runs queries on a trace in Perfetto's own trace processor, compiled to WebAssembly as its page has it.
// node trace_processor.js FOLDER TRACE < queries: a JSON list of SQL; prints a JSON list of lists of rows.
// FOLDER holds engine_bundle.js and trace_processor.wasm.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [folder, trace] = process.argv.slice(2);
const queries = JSON.parse(fs.readFileSync(0, "utf8"));
const APPEND = 1;
const FINALIZE = 2;
const QUERY = 3;
const APPEND_RESULT = 201;
const FINALIZE_RESULT = 212;
const QUERY_RESULT = 203;
const CHUNK_BYTES = 8 << 20;

function varint(value) {
  const bytes = [];
  let left = BigInt(value);
  do {
    let byte = Number(left & 127n);
    left >>= 7n;
    if (left > 0n) byte |= 128;
    bytes.push(byte);
  } while (left > 0n);
  return Buffer.from(bytes);
}

const number = (field, value) => Buffer.concat([varint(field << 3), varint(value)]);
const nested = (field, bytes) => Buffer.concat([varint((field << 3) | 2), varint(bytes.length), bytes]);

function* fields(buffer) {
  let at = 0;
  const read = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = buffer[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < buffer.length) {
    const tag = Number(read());
    const kind = tag & 7;
    if (kind === 0) yield [tag >> 3, read()];
    else if (kind === 1) { yield [tag >> 3, buffer.subarray(at, at + 8)]; at += 8; }
    else if (kind === 2) { const size = Number(read()); yield [tag >> 3, buffer.subarray(at, at + size)]; at += size; }
    else throw new Error(`wire type ${kind}`);
  }
}

function packed(buffer) {
  const values = [];
  let value = 0n;
  let shift = 0n;
  for (const byte of buffer) {
    value |= BigInt(byte & 127) << shift;
    shift += 7n;
    if (byte < 128) { values.push(BigInt.asIntN(64, value)); value = 0n; shift = 0n; }
  }
  return values;
}

// CellsBatch: kinds of cells (1 null, 2 integer, 3 float, 4 string, 5 bytes), then the cells of each kind
function readBatch(buffer, width, rows) {
  let kinds = [];
  let integers = [];
  let floats = [];
  let strings = [];
  let last = false;
  for (const [field, value] of fields(buffer)) {
    if (field === 1) kinds = packed(value).map(Number);
    if (field === 2) integers = packed(value).map(Number);
    if (field === 3) for (let at = 0; at < value.length; at += 8) floats.push(value.readDoubleLE(at));
    if (field === 5) strings = value.toString("utf8").split("\0");
    if (field === 6) last = value !== 0n;
  }
  const cells = kinds.map((kind) => [null, null, () => integers.shift(), () => floats.shift(), () => strings.shift()][kind]?.() ?? null);
  for (let at = 0; at < cells.length; at += width) rows.push(cells.slice(at, at + width));
  return last;
}

const port = { onmessage: null, postMessage: (bytes) => receive(Buffer.from(bytes)) };
const sandbox = {
  console: { log: () => {}, warn: () => {}, error: () => {} },
  TextDecoder, TextEncoder, URL, setTimeout, performance,
  XMLHttpRequest: class {
    open(method, name) { this.name = path.basename(name); }
    send() { this.response = fs.readFileSync(path.join(folder, this.name)); }
  },
};
sandbox.self = sandbox;
sandbox.location = { href: "https://localhost/engine_bundle.js" };
sandbox.WorkerGlobalScope = function () {};
sandbox.importScripts = () => {};
vm.createContext(sandbox);
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), sandbox);
// of the bundle's own realm, which it asks for
const OwnBytes = vm.runInContext("Uint8Array", sandbox);
sandbox.onmessage({ data: port });

let sequence = 0;
let answer = null;
let pending = Buffer.alloc(0);

function receive(bytes) {
  pending = Buffer.concat([pending, bytes]);
  // a message may come in pieces: 0x0a, its length, its bytes
  for (;;) {
    let at = 1;
    let size = 0;
    for (let shift = 0; at < pending.length; shift += 7) {
      const byte = pending[at++];
      size += (byte & 127) * 2 ** shift;
      if (byte < 128) break;
    }
    if (pending.length < 2 || pending.length < at + size) return;
    const message = Buffer.from(pending.subarray(at, at + size));
    pending = pending.subarray(at + size);
    for (const [field, value] of fields(message)) if (field > 200) answer?.(field, value);
  }
}

function send(request, ...parts) {
  const message = Buffer.concat([number(1, ++sequence), number(2, request), ...parts]);
  port.onmessage({ data: new OwnBytes(nested(1, message)) });
}

function ask(request, expected, ...parts) {
  return new Promise((resolve, reject) => {
    const rows = [];
    let width = 0;
    answer = (field, value) => {
      if (field !== expected) return;
      let done = field !== QUERY_RESULT;
      for (const [inner, content] of fields(value)) {
        if (field !== QUERY_RESULT) {
          // what is told in text is an error
          if (content.length) return reject(new Error(content.toString("utf8")));
          continue;
        }
        if (inner === 1) width += 1;
        if (inner === 2) return reject(new Error(content.toString("utf8")));
        if (inner === 3) done = readBatch(content, width, rows);
      }
      if (done) resolve(rows);
    };
    send(request, ...parts);
  });
}

async function main() {
  await new Promise((resolve) => setTimeout(resolve, 500));
  const file = fs.openSync(trace);
  const chunk = Buffer.alloc(CHUNK_BYTES);
  for (;;) {
    const size = fs.readSync(file, chunk, 0, CHUNK_BYTES);
    if (!size) break;
    await ask(APPEND, APPEND_RESULT, nested(101, chunk.subarray(0, size)));
  }
  await ask(FINALIZE, FINALIZE_RESULT);
  const answers = [];
  for (const query of queries) answers.push(await ask(QUERY, QUERY_RESULT, nested(103, nested(1, Buffer.from(query)))));
  process.stdout.write(JSON.stringify(answers));
  process.exit(0);
}

main().catch((error) => { process.stderr.write(`${error.stack}\n`); process.exit(1); });
