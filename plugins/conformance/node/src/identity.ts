// The ephemeral certificate of one run.
import { webcrypto } from "node:crypto";
import "reflect-metadata"; // what the next one wants first
import * as x509 from "@peculiar/x509";

export interface Identity {
  key: string;
  certificate: string;
  der: Buffer;
}

// newIdentity makes a self-signed P-256 certificate. The leaf itself is what the
// host compares, so it holds whatever the clock says.
export async function newIdentity(): Promise<Identity> {
  const crypto = webcrypto as unknown as Crypto;
  x509.cryptoProvider.set(crypto);
  const algorithm = { name: "ECDSA", namedCurve: "P-256", hash: "SHA-256" };
  const keys = await crypto.subtle.generateKey(algorithm, true, ["sign", "verify"]);
  const certificate = await x509.X509CertificateGenerator.createSelfSigned(
    {
      name: "CN=bcx",
      notBefore: new Date("1970-01-01T00:00:00Z"),
      notAfter: new Date("9999-12-31T23:59:59Z"),
      signingAlgorithm: algorithm,
      keys,
      extensions: [
        new x509.SubjectAlternativeNameExtension([{ type: "dns", value: "bcx" }]),
        new x509.KeyUsagesExtension(x509.KeyUsageFlags.digitalSignature, true),
      ],
    },
    crypto,
  );
  const pkcs8 = Buffer.from(await crypto.subtle.exportKey("pkcs8", keys.privateKey)).toString("base64");
  return {
    key: `-----BEGIN PRIVATE KEY-----\n${pkcs8.replace(/.{64}/g, "$&\n")}\n-----END PRIVATE KEY-----\n`,
    certificate: certificate.toString("pem"),
    der: Buffer.from(certificate.rawData),
  };
}
