// Walks through the pieces of all blocks, as runtime/attention/hopper/shares.cu does, for batches of any lengths. The
// test pastes a kernel's constants and plan.cuh's division ahead of it. Prints the error, or nothing.
#include <cstdio>
#include <cstdlib>
#include <vector>

#define WRONG(what) return printf("batch %d, block %d: %s\n", batch, (int)block, what), 1

int main() {
  static Counts counts;
  for (int batch = 0; batch < 3000; batch++) {
    const int num_requests = 1 + rand() % (batch % 3 ? 12 : 200), longest = batch % 2 ? 60 : 20000;
    int tiles = 0;
    for (int r = 0; r < num_requests; r++) {
      counts.lengths[r] = rand() % 4 ? rand() % (rand() % 5 ? 600 : longest) : 0;
      counts.first_tiles[r] = tiles, tiles += (counts.lengths[r] + TILE - 1) / TILE;
    }
    counts.first_tiles[num_requests] = tiles;
    gridDim.x = NUM_BLOCKS;
    const Plan plan = {counts, num_requests, (u32)tiles};
    std::vector<int> left(NUM_BLOCKS, 0), added(NUM_BLOCKS, 0);
    u32 walked = 0, block = 0;
    for (; block < NUM_BLOCKS; block++) {
      const int end = plan.begin_of(block + 1);
      for (int at = plan.begin_of(block); at < end;) {
        const Request its = plan.request_at(at);
        blockIdx.x = block;
        const Piece piece = piece_of(plan, its, end);
        if (piece.key != (at - its.first) * TILE) WRONG("begins elsewhere");
        if (piece.is_left != (at > its.first)) WRONG("is left by the wrong block");
        if (piece.is_last != (its.last >= end)) WRONG("is last at the wrong place");
        left[block] += piece.is_left, walked += (piece.stop - piece.key) / TILE;
        for (int by = 1; by <= piece.others; by += by < TEAM ? 1 : TEAM) {
          const int theirs = plan.begin_of(block + by);
          if (theirs <= its.first || theirs >= its.last) WRONG("adds what is not the request's");
          added[block + by]++;
        }
        at = its.last;
      }
    }
    if (walked != plan.all()) WRONG("not all tiles are anyone's");
    for (block = 0; block < NUM_BLOCKS; block++)
      if (left[block] > 1 || added[block] != left[block]) WRONG("what it leaves is not added up once");
  }
}
