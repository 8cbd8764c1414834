// A bcx server: one handshake line, then gRPC over a unix socket with mutual TLS.
import { timingSafeEqual, X509Certificate } from "node:crypto";
import { writeSync } from "node:fs";
import http2 from "node:http2";
import { join } from "node:path";
import type { TLSSocket } from "node:tls";
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import type { HandlerContext, ServiceImpl } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import {
  DescribeResponseSchema, DriverPlugin, HealthResponse_Status, type InvokeRequest, type InvokeResponseSchema,
  type StreamRequest, type StreamResponseSchema, type ValidateRequest,
} from "../gen/driver_pb.js";
import { type Context, type Driver, DriverError, errorOf, type Progress } from "./driver.js";
import { newIdentity } from "./identity.js";

const cookie = "bettercompute.driver.v1";
const maxMessage = 16 << 20;
const maxSocketPath = 107;
const graceMs = 4500;
const maxProgress = 1024;

export interface Options {
  pluginVersion: string;
}

function log(level: string, msg: string, more: object = {}): void {
  process.stderr.write(JSON.stringify({ time: new Date().toISOString(), level, msg, ...more }) + "\n");
}

// serve serves drivers until the host ends this process.
export async function serve(drivers: Driver[], options: Options): Promise<void> {
  if (process.env.BCX_MAGIC_COOKIE !== cookie) {
    process.stderr.write("this is a bcx driver plugin: a host (bcd or the control plane) starts it\n");
    process.exit(1);
  }
  // The host may be gone before its pipes are read: that is no reason to fail.
  process.stdout.on("error", () => {});
  process.stderr.on("error", () => {});
  // Only the handshake line belongs on stdout.
  console.log = console.info = console.debug = (...words: unknown[]) => log("INFO", words.map(String).join(" "));
  process.on("SIGINT", () => {});

  const path = join(process.env.BCX_SOCKET_DIR ?? "", "plugin.sock");
  if (Buffer.byteLength(path) > maxSocketPath) throw new Error(`socket path ${path}: limit ${maxSocketPath} bytes`);
  const host = new X509Certificate(process.env.BCX_CLIENT_CERT ?? "").raw;
  const self = await newIdentity();

  const adapter = connectNodeAdapter({
    routes: (router) => router.service(DriverPlugin, plugin(drivers, options)),
    connect: false, grpcWeb: false, grpc: true, readMaxBytes: maxMessage, writeMaxBytes: maxMessage,
  });
  // Exactly the host's certificate: another one of the same key is another peer.
  const agreed = (session?: http2.Http2Session): boolean => {
    const raw = (session?.socket as TLSSocket | undefined)?.getPeerCertificate(false)?.raw;
    return raw !== undefined && raw.length === host.length && timingSafeEqual(raw, host);
  };
  const sessions = new Set<http2.ServerHttp2Session>();
  const server = http2.createSecureServer(
    {
      key: self.key, cert: self.certificate, minVersion: "TLSv1.3", ALPNProtocols: ["h2"],
      requestCert: true, rejectUnauthorized: false,
    },
    (request, response) => {
      if (sessions.has(request.stream.session as http2.ServerHttp2Session)) adapter(request, response);
      else request.stream.session?.destroy();
    },
  );
  server.on("session", (session) => {
    if (!agreed(session)) {
      session.destroy();
      return;
    }
    sessions.add(session);
    session.on("close", () => sessions.delete(session));
    session.on("error", () => {});
  });
  server.on("tlsClientError", () => {});
  server.on("sessionError", () => {});

  let ending = false;
  const end = (why: string) => {
    if (ending) return;
    ending = true;
    log("INFO", "plugin ends", { why });
    // Calls in flight may end; no new ones come.
    server.close(() => process.exit(0));
    for (const session of sessions) session.close();
    setTimeout(() => process.exit(0), graceMs);
  };
  process.on("SIGTERM", () => end("SIGTERM"));
  for (const event of ["end", "close", "error"]) process.stdin.on(event, () => end("stdin " + event));
  process.stdin.resume();

  await new Promise<void>((resolve, reject) => {
    server.once("error", reject);
    server.listen(path, resolve);
  });
  writeSync(1, `bcx|1|unix|${path}|grpc|${self.der.toString("base64").replace(/=+$/, "")}\n`);
}

function plugin(drivers: Driver[], options: Options): ServiceImpl<typeof DriverPlugin> {
  const find = (id: string): Driver => {
    const driver = drivers.find((d) => d.id === id);
    if (!driver) throw new DriverError("unsupported-driver", `this plugin has no driver ${JSON.stringify(id.slice(0, 80))}`);
    return driver;
  };
  return {
    describe: () => create(DescribeResponseSchema, {
      protocol: 1,
      pluginVersion: options.pluginVersion,
      drivers: drivers.map((d) => ({
        manifest: {
          id: d.id, version: d.version, kinds: Object.keys(d.kinds).sort(), runsOn: d.runsOn,
          configSchemaJson: JSON.stringify(d.schema), capabilities: d.capabilities, retrySafeOperations: d.retrySafe,
        },
        streamOperations: Object.entries(d.kinds).flatMap(([kind, k]) => Object.keys(k.streams).map((op) => `${kind}.${op}`)),
      })),
    }),
    health: () => ({ status: HealthResponse_Status.SERVING, message: "" }),
    async validate(request: ValidateRequest, handler: HandlerContext) {
      const call = new Call(request, handler.signal);
      try {
        const driver = find(request.driver);
        await call.bounded(async () => {
          const config = parseConfig(driver, request.configJson);
          await driver.validate?.(call.context(request, () => {}), config);
        });
        return {};
      } catch (e) {
        return { error: errorOf(e, true) };
      } finally {
        call.end();
      }
    },
    invoke: (request: InvokeRequest, handler: HandlerContext) => invoke(find, request, handler),
    stream: (frames: AsyncIterable<StreamRequest>, handler: HandlerContext) => stream(find, frames, handler),
  };
}

type Answer = MessageInitShape<typeof InvokeResponseSchema>;

async function* invoke(find: (id: string) => Driver, request: InvokeRequest, handler: HandlerContext): AsyncGenerator<Answer> {
  const call = new Call(request, handler.signal);
  const out = new Queue<Answer>();
  let retrySafe = false;
  let ended = false;
  const emit = (p: Progress) => {
    // A caller that does not keep up misses progress, never the result.
    if (ended || out.length >= maxProgress) return;
    out.push({ event: { case: "progress", value: {
      phase: p.phase ?? "", message: p.message ?? "", done: BigInt(p.done ?? 0), total: BigInt(p.total ?? 0),
    } } });
  };
  const last = (answer: Answer) => {
    ended = true;
    out.push(answer);
    out.close();
  };
  const run = async () => {
    const driver = find(request.driver);
    const kind = own(driver.kinds, request.kind);
    if (!kind) throw new DriverError("unsupported-driver", `driver ${driver.id} does not implement ${JSON.stringify(request.kind.slice(0, 80))}`);
    const operation = own(kind.operations, request.operation);
    if (!operation) throw new DriverError("unsupported-operation", `driver ${driver.id} has no operation ${JSON.stringify(request.operation.slice(0, 80))}`);
    retrySafe = driver.retrySafe.includes(`${request.kind}.${request.operation}`);
    const args = parseArgs(request.argsJson);
    const result = await call.bounded(async () =>
      operation(call.context(request, emit), parseConfig(driver, request.configJson), args));
    const text = JSON.stringify(result ?? null);
    const size = Buffer.byteLength(text);
    if (size > maxMessage - 64) throw new DriverError("invalid-args", `the result has ${size} bytes, limit ${maxMessage}`);
    return text;
  };
  run().then(
    (resultJson) => last({ event: { case: "result", value: { resultJson } } }),
    (e) => last({ event: { case: "error", value: errorOf(e, retrySafe) } }),
  );
  try {
    yield* out;
  } finally {
    ended = true;
    call.end();
  }
}

type Frame = MessageInitShape<typeof StreamResponseSchema>;

async function* stream(find: (id: string) => Driver, frames: AsyncIterable<StreamRequest>, handler: HandlerContext): AsyncGenerator<Frame> {
  const source = frames[Symbol.asyncIterator]();
  const refused = (e: unknown, retrySafe = false): Frame => ({ frame: { case: "error", value: errorOf(e, retrySafe) } });
  const first = await source.next();
  if (first.done) return;
  if (first.value.frame.case !== "open") {
    yield refused(new DriverError("invalid-args", "the first frame is not open"));
    return;
  }
  const request = first.value.frame.value;
  const call = new Call(request, handler.signal);
  const out = new Queue<Frame>();
  const input = new Queue<Uint8Array>();
  let opened = false;
  let ended = false;
  const open = () => {
    if (opened || ended) return;
    opened = true;
    call.opened();
    out.push({ frame: { case: "data", value: new Uint8Array() } });
  };
  const bytes = {
    read: () => {
      open();
      return input;
    },
    write: async (data: Uint8Array) => {
      open();
      await out.room();
      if (!ended) out.push({ frame: { case: "data", value: data } });
    },
  };
  const end = (frame: Frame) => {
    if (ended) return;
    ended = true;
    out.push(frame);
    out.close();
  };
  let retrySafe = false;
  const run = async () => {
    const driver = find(request.driver);
    const kind = own(driver.kinds, request.kind);
    if (!kind) throw new DriverError("unsupported-driver", `driver ${driver.id} does not implement ${JSON.stringify(request.kind.slice(0, 80))}`);
    const operation = own(kind.streams, request.operation);
    if (!operation) throw new DriverError("unsupported-operation", `${JSON.stringify(request.operation.slice(0, 80))} is not a stream operation`);
    retrySafe = driver.retrySafe.includes(`${request.kind}.${request.operation}`);
    const args = parseArgs(request.argsJson);
    await call.bounded(() => operation(call.context(request, () => {}), parseConfig(driver, request.configJson), args, bytes));
    open();
  };
  run().then(() => end({ frame: { case: "close", value: {} } }), (e) => end(refused(e, retrySafe)));
  const pump = async () => {
    for (;;) {
      const next = await source.next();
      if (next.done) break;
      const frame = next.value.frame;
      if (frame.case === "close") break;
      if (frame.case !== "data") {
        end(refused(new DriverError("invalid-args", "a frame after open is neither data nor close")));
        call.abandon();
        break;
      }
      await input.room();
      input.push(frame.value);
    }
    input.close();
  };
  pump().catch(() => call.abandon()).finally(() => input.close());
  try {
    yield* out;
  } finally {
    ended = true;
    input.close();
    call.end();
  }
}

// Call is the life of one call: its deadline, its caller, and its end.
class Call {
  private readonly abort = new AbortController();
  private readonly over = Promise.withResolvers<never>();
  private timer?: NodeJS.Timeout;

  constructor(request: { deadlineMs: bigint }, caller: AbortSignal) {
    this.over.promise.catch(() => {});
    const cancelled = () => this.stop(new DriverError("cancelled", "the caller cancelled"));
    if (caller.aborted) cancelled();
    else caller.addEventListener("abort", cancelled, { once: true });
    if (request.deadlineMs !== 0n) this.arm(Number(request.deadlineMs));
  }

  // A timer holds at most 2^31 ms.
  private arm(deadline: number): void {
    const left = deadline - Date.now();
    if (left <= 0) this.stop(new DriverError("timeout", "the deadline is over", true));
    else this.timer = setTimeout(() => this.arm(deadline), Math.min(left, 2 ** 31 - 1));
  }

  private stop(reason: DriverError): void {
    this.over.reject(reason);
    this.abort.abort(reason);
  }

  // opened lifts the deadline.
  opened(): void {
    clearTimeout(this.timer);
  }

  end(): void {
    clearTimeout(this.timer);
  }

  // abandon ends the operation, since nobody can hear its answer.
  abandon(): void {
    this.stop(new DriverError("cancelled", "the stream ended"));
  }

  // bounded ends with the call even when f ignores its signal.
  bounded<T>(f: () => Promise<T>): Promise<T> {
    if (this.abort.signal.aborted) return this.over.promise;
    return Promise.race([f(), this.over.promise]);
  }

  context(request: ValidateRequest | InvokeRequest, emit: (p: Progress) => void): Context {
    const secrets = new Map(Object.entries(request.secrets));
    const invoked = "idempotencyKey" in request ? request : undefined;
    return {
      signal: this.abort.signal,
      idempotencyKey: invoked?.idempotencyKey ?? "",
      traceparent: invoked?.traceparent ?? "",
      targetNodeId: invoked?.targetNodeId ?? "",
      secret(ref) {
        const value = secrets.get(ref);
        if (value === undefined) {
          throw new DriverError("credentials-unavailable", `secret ${JSON.stringify(ref.slice(0, 80))} was not delivered with this call`);
        }
        return value;
      },
      emit,
      log: (message) => log("INFO", message, { driver: request.driver }),
    };
  }
}

// Queue hands values from one side to the other.
class Queue<T> implements AsyncIterable<T> {
  private readonly values: T[] = [];
  private closed = false;
  private wake = Promise.withResolvers<void>();
  private taken = Promise.withResolvers<void>();

  get length(): number {
    return this.values.length;
  }

  push(value: T): void {
    if (this.closed) return;
    this.values.push(value);
    this.wake.resolve();
  }

  close(): void {
    this.closed = true;
    this.wake.resolve();
    this.taken.resolve();
  }

  // room waits until the other side has kept up.
  async room(): Promise<void> {
    while (!this.closed && this.values.length >= 8) {
      this.taken = Promise.withResolvers<void>();
      await this.taken.promise;
    }
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<T> {
    for (;;) {
      if (this.values.length > 0) {
        const value = this.values.shift()!;
        this.taken.resolve();
        yield value;
      } else if (this.closed) {
        return;
      } else {
        this.wake = Promise.withResolvers<void>();
        await this.wake.promise;
      }
    }
  }
}

// own reads what a table itself holds, never what every object has.
function own<T>(table: Record<string, T>, name: string): T | undefined {
  return Object.hasOwn(table, name) ? table[name] : undefined;
}

function parseConfig<C>(driver: Driver<C>, text: string): C {
  let raw: unknown = {};
  try {
    if (text.trim() !== "") raw = JSON.parse(text);
  } catch {
    throw new DriverError("invalid-config", "the configuration is not JSON");
  }
  return driver.parse(raw);
}

// parseArgs reads positional arguments: nulls at the end were left out.
function parseArgs(text: string): unknown[] {
  if (text.trim() === "") return [];
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    throw new DriverError("invalid-args", "the arguments are not JSON");
  }
  const args = Array.isArray(value) ? value : [value];
  while (args.length > 0 && args.at(-1) === null) args.pop();
  return args;
}
