// One text from a coordinator, streamed, by the proto files alone:
//
//   npm install @grpc/grpc-js @grpc/proto-loader
//   node examples/generate.mjs [PROMPT] [HOST:PORT]
//
// If a stream breaks, send the request again with `resume.output_token_ids`, the tokens that came, and the seed of
// `started`: no token is lost or doubled.
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [prompt = "def main():", address = "127.0.0.1:50051"] = process.argv.slice(2);
const loaded = protoLoader.loadSync("specdec/v1/coordinator_service.proto", {
  includeDirs: [fileURLToPath(new URL("../proto", import.meta.url))],
  keepCase: true, // names as in the proto
  longs: String, // 64 bits do not fit a number
});
const { CoordinatorService } = grpc.loadPackageDefinition(loaded).specdec.v1;
const client = new CoordinatorService(address, grpc.credentials.createInsecure());

const stream = client.Generate({ text: prompt, sampling: { max_tokens: 64, temperature: 0.7, seed: "1" } });
stream.on("data", (response) => {
  if (response.delta) process.stdout.write(response.delta.text);
  if (response.finished) {
    const accepted = 100 * response.finished.statistics.draft_acceptance_rate;
    console.log(`\n[${accepted.toFixed(0)}% of the draft tokens accepted]`);
  }
});
stream.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
stream.on("end", () => client.close());
