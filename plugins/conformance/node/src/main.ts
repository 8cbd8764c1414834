import { conformance } from "./conformance.js";
import { serve } from "./serve.js";

serve([conformance], { pluginVersion: "1.0.0" }).catch((e: unknown) => {
  process.stderr.write(JSON.stringify({ level: "ERROR", msg: "plugin did not start", reason: String(e) }) + "\n");
  process.exit(1);
});
