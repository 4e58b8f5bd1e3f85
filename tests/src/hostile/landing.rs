//! Landing plans: what is read of a file whose data is elsewhere.

use super::adapters::{Split, pool};
use super::model;
use lora_config::{ParseOptions, parse_peft_adapter_config};
use lora_weights::device::DevicePtr;
use lora_weights::{
    AdapterStore, LandPlace, LandRequest, PackSource, PoolLayout, WeightManifest, audit_adapter,
    build_land_targets, image_bytes, pack_adapter, rebuild_slot_layers,
};

/// An adapter folder as [`folder`](super::adapters::folder) takes it, read as a peer's: header first, then each matrix to its place.
pub(super) fn landing_plan(data: &[u8]) {
    let Some(split) = Split::of(data) else {
        return;
    };
    let (spec, pool) = (model(split.which), pool(split.flags));
    let file = split.weights;
    let Ok(config) = std::str::from_utf8(split.config) else {
        return;
    };
    let Ok(config) = parse_peft_adapter_config(config, &ParseOptions::default()) else {
        return;
    };
    let Ok(weights) = WeightManifest::parse(file, file.len() as u64) else {
        return;
    };
    let layout = PoolLayout::new(spec, &pool).expect("a small pool");
    let bytes = layout.bytes();
    let unit = |n: u64| DevicePtr(bytes.slot + n * bytes.expert_unit);
    let units: Vec<DevicePtr> = (0..64).map(unit).collect();
    let request = LandRequest {
        name: "fuzzed",
        weights: &weights,
        config: &config,
        model: spec,
        pool: &pool,
    };
    let place = LandPlace {
        slot: DevicePtr::NULL,
        units: &units,
    };
    let Ok(targets) = build_land_targets(request, place) else {
        return;
    };
    rebuild_slot_layers(&targets, &config, layout.layers()).expect("a plan gives its pairs back");
    let end = unit(64).0 as usize;
    let mut landed = vec![0; end];
    for target in &targets {
        let source = target.source();
        assert!(source.end <= file.len() as u64, "{target:?}");
        target.copy_piece(0, file, &mut landed);
    }
    // What lands is what packing makes of the same file, values and all.
    let dir = tempfile::tempdir().expect("a temporary folder");
    split.write(dir.path());
    let store = AdapterStore::open(dir.path()).expect("what a manifest describes opens");
    let report = audit_adapter(&store, &config, spec, &pool);
    if !report.ok() {
        return;
    }
    let pairs = &report.pairs;
    let length = image_bytes(&layout, pairs).expect("a small image");
    let mut image = vec![0xffff_u16; length / 2];
    let store = &store;
    pack_adapter(
        PackSource { store, pairs },
        &layout,
        bytemuck::cast_slice_mut(&mut image),
    )
    .expect("audited pairs pack");
    assert!(landed[..length] == *bytemuck::cast_slice::<u16, u8>(&image));
}
