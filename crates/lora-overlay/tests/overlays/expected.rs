//! What overlays must give, worked out row by row on the host.

use crate::world::{Table, World, bits, table_of};
use half::bf16;
use lora_kernels::overlay::{HeadRows, LogitsMut, OverlayTokens, SlotOfRow};
use lora_kernels::testing::Rng;
use lora_kernels::{DeviceBuffer, RowGroups, RowGroupsSpec, Stream};
use lora_overlay::{EmbedOverlay, HeadOverlay, TokenOverlaySet};
use std::collections::BTreeMap;

/// Rows by the id that they replace.
pub(crate) type Rows = BTreeMap<u32, Vec<bf16>>;

/// What one slot overrides: embedding and head.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Overridden {
    pub(crate) embed: Rows,
    pub(crate) head: Rows,
}

/// Rows of `table` by these ids.
pub(crate) fn rows(ids: impl IntoIterator<Item = (u32, usize)>, table: &Table) -> Rows {
    let row = |(id, row): (u32, usize)| (id, table.row(row).to_vec());
    ids.into_iter().map(row).collect()
}

/// What an overlay holds, read back.
pub(crate) fn held(overlay: &EmbedOverlay) -> Overridden {
    let width = overlay.hidden as usize;
    let read = |ids: &DeviceBuffer, buffer: &DeviceBuffer, n: u32| -> Rows {
        let ids: Vec<u32> = ids.download(0, n as usize).expect("reads back");
        assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "{ids:?}");
        rows(
            ids.into_iter().zip(0..),
            &table_of(buffer, n as usize, width),
        )
    };
    let embed = read(&overlay.ids_dev, &overlay.rows, overlay.n_override);
    if overlay.n_override > 0 {
        let map: Vec<i32> = overlay
            .slot_map
            .download(0, overlay.vocab as usize)
            .expect("reads back");
        for (id, place) in (0..).zip(map) {
            let wanted = embed.keys().position(|other| *other == id);
            assert_eq!(usize::try_from(place).ok(), wanted, "id {id}");
        }
    }
    let head = match &overlay.lmhead {
        HeadOverlay::Untouched => Rows::new(),
        HeadOverlay::Embed => embed.clone(),
        HeadOverlay::Own(head) => read(&head.ids_dev, &head.rows, head.n_override),
    };
    Overridden { embed, head }
}

/// A batch: the token of each row and the slot that it follows.
pub(crate) struct Batch {
    pub(crate) tokens: Vec<i32>,
    pub(crate) slots: Vec<i32>,
}

impl Batch {
    /// Every slot, one past the set, base rows; every id, one past the vocabulary, a negative one.
    pub(crate) fn mixed(rows: usize, slots: i32, vocab: i32) -> Self {
        let mut rng = Rng::new(rows as u64);
        let mut pick = |range: std::ops::Range<i32>| {
            range.start + rng.below(0..(range.end - range.start) as usize) as i32
        };
        Self {
            tokens: (0..rows).map(|_| pick(-1..vocab + 1)).collect(),
            slots: (0..rows).map(|_| pick(-1..slots + 1)).collect(),
        }
    }

    fn groups(&self, world: &World, entries: u32) -> RowGroups {
        let spec = RowGroupsSpec::new((self.slots.len() as u32).max(1), entries, 48);
        let mut groups = RowGroups::new(world.memory(), spec).expect("groups");
        let slots = DeviceBuffer::from_slice(world.backend.clone(), &self.slots).expect("memory");
        let list = slots.row_slots(self.slots.len()).expect("fits");
        groups
            .build(&*world.backend, Stream::OWN, list)
            .expect("groups rows");
        world.backend.synchronize(Stream::OWN).expect("done");
        groups
    }

    /// What the rows of this batch follow, where their slot has an overlay.
    fn of_row<'a>(&self, row: usize, slots: &'a [Overridden]) -> Option<&'a Overridden> {
        slots.get(usize::try_from(self.slots[row]).ok()?)
    }
}

/// Embedding rows: copied ones are theirs bit for bit, all others untouched.
pub(crate) fn embeddings_are_exact(
    world: &World,
    set: &TokenOverlaySet,
    slots: &[Overridden],
    batch: &Batch,
) {
    let (count, width) = (batch.tokens.len(), world.hidden());
    let before = Table::random(count, width, 77);
    let upload =
        |values: &[i32]| DeviceBuffer::from_slice(world.backend.clone(), values).expect("memory");
    let (tokens, row_slots) = (upload(&batch.tokens), upload(&batch.slots));
    let mut out = DeviceBuffer::from_slice(world.backend.clone(), &before.values).expect("memory");
    let tokens = OverlayTokens {
        ids: tokens.token_ids(count).expect("fits"),
        slots: SlotOfRow::Each(row_slots.row_slots(count).expect("fits")),
    };
    let _ = set
        .apply_embeddings(
            (&world.kernels, Stream::OWN),
            tokens,
            out.mat_mut(count, width, width).expect("fits"),
        )
        .expect("applies");
    world.backend.synchronize(Stream::OWN).expect("done");
    let after = table_of(&out, count, width);
    for row in 0..count {
        let of_row = batch.of_row(row, slots);
        let id = u32::try_from(batch.tokens[row]).ok();
        let wanted = id.and_then(|id| of_row?.embed.get(&id));
        let wanted = wanted.map_or(before.row(row), Vec::as_slice);
        let (id, slot) = (batch.tokens[row], batch.slots[row]);
        assert_eq!(
            bits(after.row(row)),
            bits(wanted),
            "row {row}, token {id}, slot {slot}"
        );
    }
}

/// Logits: those of overridden ids are the dot product at tolerance, all others untouched.
pub(crate) fn logits_are_right(
    world: &World,
    set: &TokenOverlaySet,
    slots: &[Overridden],
    batch: &Batch,
) {
    for f32_logits in [false, true] {
        logits_of(world, set, (slots, batch), f32_logits);
    }
}

fn logits_of(
    world: &World,
    set: &TokenOverlaySet,
    (slots, batch): (&[Overridden], &Batch),
    f32_logits: bool,
) {
    let (count, width) = (batch.slots.len(), world.hidden());
    let vocab = world.head.rows;
    let hidden = Table::random(count, width, 5);
    let before = Table::random(count, vocab, 6);
    let x = DeviceBuffer::from_slice(world.backend.clone(), &hidden.values).expect("memory");
    let wide: Vec<f32> = before.values.iter().map(|v| v.to_f32()).collect();
    let mut out = match f32_logits {
        true => DeviceBuffer::from_slice(world.backend.clone(), &wide),
        false => DeviceBuffer::from_slice(world.backend.clone(), &before.values),
    }
    .expect("memory");
    let groups = batch.groups(world, set.slots());
    let logits = match f32_logits {
        true => LogitsMut::F32(out.f32_mat_mut(count, vocab, vocab).expect("fits")),
        false => LogitsMut::Bf16(out.mat_mut(count, vocab, vocab).expect("fits")),
    };
    let x = x.mat(count, width, width).expect("fits");
    let _ = set
        .apply_logits(
            (&world.kernels, Stream::OWN),
            x,
            HeadRows::Grouped(&groups),
            logits,
        )
        .expect("applies");
    world.backend.synchronize(Stream::OWN).expect("done");
    let after: Vec<f32> = match f32_logits {
        true => out.download(0, count * vocab).expect("reads back"),
        false => table_of(&out, count, vocab)
            .values
            .iter()
            .map(|v| v.to_f32())
            .collect(),
    };
    for row in 0..count {
        let own = batch.of_row(row, slots).map(|o| &o.head);
        for id in 0..vocab {
            let (got, base) = (after[row * vocab + id], wide[row * vocab + id]);
            let Some(values) = own.and_then(|head| head.get(&(id as u32))) else {
                assert_eq!(
                    got.to_bits(),
                    base.to_bits(),
                    "row {row}, id {id} is touched"
                );
                continue;
            };
            let terms = hidden.row(row).iter().zip(values);
            let terms = terms.map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32()));
            let (sum, size) = terms.fold((0.0, 0.0), |(s, m), t| (s + t, m + t.abs()));
            let rounding = if f32_logits { 1e-5 } else { 1.0 / 256.0 };
            let allowed = size * 1e-5 + sum.abs() * rounding;
            let distance = (f64::from(got) - sum).abs();
            assert!(distance <= allowed, "row {row}, id {id}: {got} for {sum}");
        }
    }
}
