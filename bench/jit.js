// A process full of objects that goes on compiling: bench/dumped.py has CRIU dump it twice.
// Prints `ready` once it has as much memory as the argument says, and runs until it is killed.
"use strict";

const wanted = Number(process.argv[2]);
const kept = [];
let round = 0;

// Source that V8 has not seen before, and that soon runs often enough to be optimised.
function hot(seed) {
  const body = `let x = ${seed};
    for (let i = 0; i < count; i++) x = (x * 33 + items[i % items.length].value + ${seed % 97}) | 0;
    return x;`;
  return new Function("items", "count", body);
}

function objects(count) {
  const made = [];
  for (let i = 0; i < count; i++) {
    made.push({ value: i ^ round, name: `key-${round}-${i}`, list: [i, Math.random(), round] });
  }
  return made;
}

function work() {
  round += 1;
  const short = objects(2000);
  hot(round * 7919)(short, 200000);
  kept[Math.floor(Math.random() * kept.length)] = objects(1000);
  setTimeout(work, 20);
}

while (process.memoryUsage().rss < wanted) kept.push(objects(1000));
require("fs").writeSync(1, "ready\n");
work();
