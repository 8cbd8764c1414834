// What a driver is: its manifest, its operations, and what a call gets.

// DriverError is an error of the driver's own; its code is kebab-case.
export class DriverError extends Error {
  constructor(readonly code: string, message: string, readonly retryable = false) {
    super(message);
  }
}

// ComputeError has one of the control plane's upper-case codes.
export class ComputeError extends Error {
  constructor(readonly code: string, message: string) {
    super(message);
  }
}

export interface Progress {
  phase?: string;
  message?: string;
  done?: number;
  total?: number;
}

export interface Context {
  signal: AbortSignal;
  idempotencyKey: string;
  traceparent: string;
  targetNodeId: string;
  // secret resolves only what came with this call.
  secret(ref: string): string;
  emit(progress: Progress): void;
  log(message: string): void;
}

// Bytes is a stream as its operation sees it. It opens at the first use.
export interface Bytes {
  read(): AsyncIterable<Uint8Array>;
  // write waits while the other side does not keep up.
  write(data: Uint8Array): Promise<void>;
}

export type Operation<C> = (context: Context, config: C, args: unknown[]) => unknown;
export type StreamOperation<C> = (context: Context, config: C, args: unknown[], bytes: Bytes) => Promise<void>;

export interface Driver<C = any> {
  id: string;
  version: string;
  runsOn: "control-plane" | "site" | "node" | "ramdisk";
  schema: object;
  capabilities: string[];
  retrySafe: string[];
  // parse checks a configuration and fills in what is left out.
  parse(config: unknown): C;
  kinds: Record<string, { operations: Record<string, Operation<C>>; streams: Record<string, StreamOperation<C>> }>;
  validate?(context: Context, config: C): Promise<void>;
}

const kebab = /^[a-z][a-z0-9]*(-[a-z0-9]+)*$/;

// errorOf is a thrown value as the wire carries it.
export function errorOf(thrown: unknown, retrySafe: boolean): { code: string; message: string; retryable: boolean } {
  const message = thrown instanceof Error ? thrown.message : String(thrown);
  if (thrown instanceof DriverError && thrown.code.length <= 64 && kebab.test(thrown.code)) {
    return { code: thrown.code, message, retryable: thrown.retryable && retrySafe };
  }
  if (thrown instanceof ComputeError && thrown.code.length <= 64 && /^[A-Z][A-Z0-9]*(_[A-Z0-9]+)*$/.test(thrown.code)) {
    return { code: thrown.code.toLowerCase().replaceAll("_", "-"), message, retryable: false };
  }
  return { code: "driver-error", message, retryable: false };
}
