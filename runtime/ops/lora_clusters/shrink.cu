// A of each token's adapter times the inputs of a linear, of many tokens on Hopper: one kernel, which reads them once
// (rows.cuh, which is in front of this file, as are its constants).

struct Operands {
  const uint4 *x, *a;
  const int* slots;
  u32* out;
  int num_tokens;
  int early_slots;  // no kernel right ahead writes slots
};
struct Shared {
  OfA of_a;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "as it is launched");

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    shrink_in_clusters(const __grid_constant__ Operands operands) {
  extern __shared__ __align__(1024) char memory[];
  OfA& of_a = ((Shared*)memory)->of_a;
  const int num_tokens = operands.num_tokens;
  const Lane lane;
  Tiles tiles(num_tokens);
  int held = -1;
  meet_cluster();  // none sends before all are there
  if (!operands.early_slots) wait_for_prerequisites();
  const int first_slot = TileSlots(operands.slots, lane, tiles.tile * TOKENS, num_tokens).next();
  if (first_slot >= 0) of_a.get(held, operands.a, lane, first_slot);
  if (operands.early_slots) wait_for_prerequisites();
  start_dependents();
  Values next;
  next.get(operands.x, lane, tiles.tile * TOKENS, num_tokens);
  for (int tile = tiles.tile; tile < tiles.end; tile++) {
    const TileSlots slots(operands.slots, lane, tile * TOKENS, num_tokens);
    const Values values = next;
    if (tile + 1 < tiles.end) next.get(operands.x, lane, (tile + 1) * TOKENS, num_tokens);
    of_a.multiply(held, values, operands.a, lane, slots);
    of_a.add_up(tile, operands.out, num_tokens);
  }
}
