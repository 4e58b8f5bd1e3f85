//! Audit and pack into an engine's own memory: `cargo run -p lora-weights --example own_allocator`.
use lora_config::{ModelSpec, parse_peft_adapter_config};
use lora_weights::{AdapterStore, LoraAdapterInput, LoraModule, PoolSpec, device::*};
use parking_lot::Mutex;

/// An engine's memory: one arena, freed as a whole; addresses are offsets into it.
struct Arena(Mutex<Vec<u8>>);

impl DeviceMemory for Arena {
    fn alloc_zeroed(&self, bytes: u64) -> Result<DevicePtr, MemoryError> {
        let mut arena = self.0.lock();
        let at = arena.len().next_multiple_of(256).max(256); // 0 is null
        arena.resize(at + bytes as usize, 0);
        Ok(DevicePtr(at as u64))
    }
    fn free(&self, _: DevicePtr) -> Result<(), MemoryError> {
        Ok(())
    }
    fn memory_info(&self) -> Result<MemoryInfo, MemoryError> {
        let total = 1 << 30;
        let free = total - self.0.lock().len() as u64;
        Ok(MemoryInfo { free, total })
    }
    fn stage(&self, bytes: usize) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        Ok(Box::new(HostStaging::zeroed(bytes)?)) // for a device: pinned memory
    }
    fn upload(
        &self,
        source: Box<dyn StagingBuffer>,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Completion>, MemoryError> {
        for copy in copies {
            for (from, DevicePtr(to)) in copy.row_starts() {
                let row = &source.bytes()[from..][..copy.row_bytes];
                self.0.lock()[to as usize..][..row.len()].copy_from_slice(row);
            }
        }
        Ok(Box::new(Landed(source))) // for a device: an event on a copy stream
    }
    fn download(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), MemoryError> {
        dst.copy_from_slice(&self.0.lock()[src.0 as usize..][..dst.len()]);
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let case = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/cases");
    let model = std::fs::read_to_string(format!("{case}/llama_plain/config.json"))?;
    let model = ModelSpec::from_hf_config(&model)?;
    let store = AdapterStore::open(format!("{case}/llama_plain/adapter").as_ref())?;
    let config = parse_peft_adapter_config(store.config_json(), &Default::default())?;
    let input = [LoraAdapterInput::new("plain", &store, &config)];
    let memory = std::sync::Arc::new(Arena(Mutex::default()));
    let pool = PoolSpec::new(4, 16); // 4 slots of rank 16
    let weights = lora_weights::load_lora_adapters_multi(memory, model, pool, &input)?;
    // What the engine's own kernels read: tables at fixed addresses, by slot.
    println!("{:?}", weights.route(0, LoraModule::QProj));
    Ok(())
}
