// The driver that the conformance suite knows: an operation for each thing that
// the protocol asks of a plugin.
import { setTimeout as sleep } from "node:timers/promises";
import { ComputeError, type Context, type Driver, DriverError } from "./driver.js";

interface Config {
  greeting: string;
  token?: string;
  delayMs: number;
}

interface Failure {
  code?: string;
  message?: string;
  retryable?: boolean;
}

interface Pipe {
  openDelayMs?: number;
  refuse?: Failure;
  fail?: Failure;
  token?: string;
}

// Waits that a cancellation ended, oldest first.
const cancelled: string[] = [];

function remember(token: string): void {
  cancelled.push(token);
  if (cancelled.length > 1024) cancelled.shift();
}

function invalidConfig(message: string): never {
  throw new DriverError("invalid-config", message);
}

function object(value: unknown): Record<string, unknown> {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new DriverError("invalid-args", "want an object");
  return value as Record<string, unknown>;
}

function number(value: unknown): number {
  if (typeof value !== "number" || !Number.isInteger(value) || value < 0) throw new DriverError("invalid-args", "want a whole number");
  return value;
}

function text(value: unknown): string {
  if (typeof value !== "string") throw new DriverError("invalid-args", "want a string");
  return value;
}

function fail(value: unknown): never {
  const f = object(value) as Failure;
  throw new DriverError(f.code ?? "", f.message ?? "", f.retryable ?? false);
}

async function pause(context: Context, ms: number): Promise<void> {
  await sleep(ms, undefined, { signal: context.signal });
}

export const conformance: Driver<Config> = {
  id: "conformance",
  version: "1.0.0",
  runsOn: "site",
  capabilities: ["conformance"],
  retrySafe: ["echo", "nothing", "config", "context", "secret", "failRetrySafe"].map((op) => `conformance.${op}`).sort(),
  schema: {
    $schema: "https://json-schema.org/draft/2020-12/schema",
    type: "object",
    additionalProperties: false,
    properties: {
      greeting: { type: "string", maxLength: 64, default: "hello" },
      token: { type: "string", writeOnly: true, "x-bc": { kind: "secret" } },
      delayMs: { type: "integer", minimum: 0, maximum: 60000, default: 0 },
    },
  },
  parse(value) {
    if (typeof value !== "object" || value === null || Array.isArray(value)) invalidConfig("the configuration is not an object");
    const raw = value as Record<string, unknown>;
    for (const name of Object.keys(raw)) {
      if (!["greeting", "token", "delayMs"].includes(name)) invalidConfig(`unknown field ${JSON.stringify(name.slice(0, 80))}`);
    }
    const { greeting = "hello", token, delayMs = 0 } = raw;
    if (typeof greeting !== "string" || greeting.length > 64) invalidConfig("greeting: want a string of at most 64 characters");
    if (token !== undefined && typeof token !== "string") invalidConfig("token: want a reference");
    if (typeof delayMs !== "number" || !Number.isInteger(delayMs) || delayMs < 0 || delayMs > 60000) invalidConfig("delayMs: want 0 to 60000");
    return { greeting, delayMs, ...(token === undefined ? {} : { token }) };
  },
  async validate(context, config) {
    if (config.token !== undefined) context.secret(config.token);
    await pause(context, config.delayMs);
  },
  kinds: {
    conformance: {
      operations: {
        echo: (_context, _config, args) => args,
        nothing: () => undefined,
        config: (_context, config) => config,
        context: (context) => ({
          idempotencyKey: context.idempotencyKey, traceparent: context.traceparent, targetNodeId: context.targetNodeId,
        }),
        async sleep(context, _config, args) {
          context.emit({ phase: "sleep" });
          await pause(context, number(args[0]));
          return "slept";
        },
        async ignoreDeadline(_context, _config, args) {
          await sleep(number(args[0]));
          return "slept";
        },
        async wait(context, _config, args) {
          const token = text(args[0]);
          context.emit({ phase: "wait" });
          await new Promise<void>((resolve) => context.signal.addEventListener("abort", () => resolve(), { once: true }));
          remember(token);
          throw context.signal.reason;
        },
        cancelled: (_context, _config, args) => cancelled.includes(text(args[0])),
        progress(context, _config, args) {
          const n = number(args[0]);
          for (let i = 1; i <= n; i++) context.emit({ phase: "count", message: `${i} of ${n}`, done: i, total: n });
          return n;
        },
        fail: (_context, _config, args) => fail(args[0]),
        failRetrySafe: (_context, _config, args) => fail(args[0]),
        failCompute(_context, _config, args) {
          const f = object(args[0]) as Failure;
          throw new ComputeError(f.code ?? "", f.message ?? "");
        },
        failPlain(_context, _config, args) {
          throw new Error(text(args[0]));
        },
        secret: (context, _config, args) => context.secret(text(args[0])),
        big: (_context, _config, args) => "x".repeat(number(args[0])),
        log: (context, _config, args) => context.log(text(args[0])),
        print: (_context, _config, args) => console.log(text(args[0])),
      },
      streams: {
        async pipe(context, _config, args, bytes) {
          const how = (args.length > 0 ? object(args[0]) : {}) as Pipe;
          if (how.refuse) fail(how.refuse);
          if (how.openDelayMs) await pause(context, how.openDelayMs);
          context.signal.addEventListener("abort", () => how.token && remember(how.token), { once: true });
          for await (const data of bytes.read()) {
            await bytes.write(data);
            if (how.fail) fail(how.fail);
          }
        },
      },
    },
  },
};
